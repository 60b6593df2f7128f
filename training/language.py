"""The frozen language model as a teacher: how well it answers questions about an embedded picture.

All questions of a picture stand behind one copy of its image: each sees the image and itself, and its positions start
where the image ends, so that it reads exactly what it would alone. Only answers are scored.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.models.pictures import KINDS, Question

BEFORE = "<|im_start|>user\n"
BETWEEN = "<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"
IMAGE_TOKENS = 65
FORM_WEIGHT = 0.1  # of an answer's token that its question tells already: such are soon learned


class Scores(NamedTuple):
    loss: Tensor  # scalar
    right: Tensor  # [kinds]: questions answered right, every token the likeliest
    asked: Tensor  # [kinds]


class LanguageModel:
    def __init__(self, directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)
        self.body, self.head = model.model, model.lm_head
        self.words: Tensor = model.get_input_embeddings().weight  # [vocabulary, 576]
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._before = self.ids(BEFORE)
        self._between, self._end = self.ids(BETWEEN), self.ids(END)
        self._form = self.ids("The") + self.ids(" is a.") + self._end

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def score(self, images: Tensor, kept: Tensor, asked: list[list[Question]]) -> Scores:
        """images: [B, K, 576] float32, embeddings of the image tokens whose places are `kept` [B, K] (ascending)."""
        prefix = len(self._before) + images.shape[1]
        rows = [self._row(questions) for questions in asked]
        length = prefix + max(len(row.ids) for row in rows)
        batch = len(rows)
        ids = torch.zeros(batch, length, dtype=torch.long)
        positions = torch.zeros(batch, length, dtype=torch.long)
        group = torch.full((batch, length), -1)  # 0: the image and what is before it; n: question n; -1: padding
        group[:, :prefix] = 0
        ids[:, : len(self._before)] = torch.tensor(self._before)
        positions[:, : len(self._before)] = torch.arange(len(self._before))
        positions[:, len(self._before) : prefix] = kept + len(self._before)
        for number, row in enumerate(rows):
            span = slice(prefix, prefix + len(row.ids))
            ids[number, span] = torch.tensor(row.ids)
            positions[number, span] = torch.tensor(row.positions) + len(self._before) + IMAGE_TOKENS
            group[number, span] = torch.tensor(row.group)
        same = group.unsqueeze(2) == group.unsqueeze(1)
        visible = (same | (group.unsqueeze(1) == 0)) & torch.ones(length, length, dtype=torch.bool).tril()
        mask = torch.zeros(batch, 1, length, length).masked_fill(~visible.unsqueeze(1), torch.finfo(torch.float32).min)

        embeds = self.words[ids]
        embeds = torch.cat([embeds[:, : len(self._before)], images, embeds[:, prefix:]], dim=1)
        hidden = self.body(
            inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        where = [(number, prefix + at) for number, row in enumerate(rows) for at in row.scored]
        index = torch.tensor(where)
        logits = self.head(hidden[index[:, 0], index[:, 1]])  # [answer tokens, vocabulary]
        targets = torch.tensor([token for row in rows for token in row.targets])
        told = torch.tensor([token for row in rows for token in row.told])
        weights = torch.where(told, FORM_WEIGHT, 1.0)
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none") * weights
        total = sum(len(questions) for questions in asked)

        hits = (logits.detach().argmax(-1) == targets).tolist()
        right, count, at = torch.zeros(len(KINDS)), torch.zeros(len(KINDS)), 0
        for questions, row in zip(asked, rows, strict=True):
            for question, tokens in zip(questions, row.answer_lengths, strict=True):
                kind = KINDS.index(question.kind)
                right[kind] += all(hits[at : at + tokens])
                count[kind] += 1
                at += tokens
        return Scores(losses.sum() / total, right, count)

    class _Row(NamedTuple):
        ids: list[int]
        positions: list[int]  # from the end of the image
        group: list[int]
        scored: list[int]  # places in `ids` whose next token is scored
        targets: list[int]
        told: list[bool]  # whether a target is no news
        answer_lengths: list[int]  # tokens, the end among them

    def _row(self, questions: list[Question]) -> "_Row":
        row = self._Row([], [], [], [], [], [], [])
        for number, question in enumerate(questions, 1):
            asked = self.ids(question.text) + self._between
            answer = self.ids(question.answer) + self._end
            first = len(row.ids)
            row.ids.extend(asked + answer[:-1])
            length = len(row.ids) - first
            row.positions.extend(range(length))
            row.group.extend([number] * length)
            row.scored.extend(range(first + len(asked) - 1, first + length))
            row.targets.extend(answer)
            known = {*self.ids(question.text), *self._form}
            row.told.extend(token in known for token in answer)
            row.answer_lengths.append(len(answer))
        return row

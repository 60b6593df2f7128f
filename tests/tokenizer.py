"""A small byte-level tokenizer with a chat template, saved as Hugging Face files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the mesh serves the tokens in order",
    "one two three four five six seven eight nine ten times the number of the beginning and the END",
    "안녕하세요 세계 👩‍👩‍👧 emoji 🙂 and accents é ü ñ",
)


def save_tokenizer(
    directory: Path,
    vocab_size: int = 512,
    *,
    special: Sequence[str] = (),
    named: Mapping[str, str] | None = None,
    template: str = CHAT_TEMPLATE,
) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and the chat template; every id below 261 decodes to something.

    special: further special tokens, from id 5 on. named: some of them by the names that processors look for.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *special],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=template,
        **({"extra_special_tokens": dict(named)} if named else {}),
    )
    fast.save_pretrained(directory)
    return directory

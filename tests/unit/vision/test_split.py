"""Both parts together, as encode and prefill use them: the logits of the whole model."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.models.tokenizer import Tokenizer
from common.models.vision.mrope import mrope_positions
from common.models.vision.partial import load_language
from common.models.vision.tower import VisionTower
from tests import oracle
from tests.unit.vision.conftest import noise

SIZES = [(90, 70), (200, 31), (56, 120)]


def test_logits_of_the_whole_model(checkpoint: Path) -> None:
    tower, language = VisionTower(checkpoint, torch.float32), load_language(checkpoint, torch.float32)
    tokenizer, spec = Tokenizer(checkpoint), tower.spec
    parts = [{"type": "image"}, {"type": "text", "text": "one"}, {"type": "image"}, {"type": "image"}]
    text = tokenizer.render_chat([{"role": "user", "content": parts}])
    ids = tokenizer.encode(spec.expand_text(text, SIZES), add_special_tokens=False)
    images = [noise(*size, seed=number) for number, size in enumerate(SIZES)]
    assert ids == oracle.expanded_ids(checkpoint, text, images)

    places = spec.place(ids, SIZES)
    tokens, options = torch.tensor([ids]), dict[str, Any]()
    mask = tokens == spec.image_token_id
    levels = torch.cat(tower.forward(tower.process(images)), dim=1)
    with torch.inference_mode():
        embeds = language.embed_tokens(tokens).masked_scatter(mask[..., None], levels[0])
        if places[0].grid:
            positions, _ = mrope_positions(len(ids), places)
        else:
            positions = np.arange(len(ids))
        options["position_ids"] = torch.from_numpy(positions)[..., None, :]
        if len(levels) > 1:
            options |= {"visual_pos_masks": mask, "deepstack_visual_embeds": list(levels[1:])}
        model = oracle.reference_vlm(checkpoint)
        if not spec.splittable:
            options["attention_mask"] = model.create_masks_for_generate(
                model.config, embeds, None, None, options["position_ids"], token_type_ids=mask.long()
            )
        ours = language.lm_head(language.model(inputs_embeds=embeds, use_cache=False, **options).last_hidden_state)
        theirs = model(**oracle.model_inputs(checkpoint, ids, images)).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))

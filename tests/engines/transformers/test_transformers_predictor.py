"""The dry run of a whole vocabulary, against the dry run of requests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

import torch  # noqa: E402

import transformers_models as models  # noqa: E402
from coterie.engines.tiny import tiny_model_path  # noqa: E402
from coterie.engines.transformers import dry_run, load_model  # noqa: E402
from coterie.engines.transformers.dry_run import dry_run_table  # noqa: E402
from coterie.errors import UnavailableError  # noqa: E402
from coterie.predictors import PredictRequest, TokenTable  # noqa: E402
from coterie.prompts import load_prompts, take_in_turn  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: threads would only wait for each other
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model(tiny_model_path())


@pytest.fixture(scope="module")
def table(tiny: Any) -> Any:
    return dry_run_table(tiny.model, tiny.name)


def requests(vocabulary: Any) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocabulary, n).tolist() for n in (1, 7, 40, 200)]


def test_it_is_the_dry_run_of_real_prompts_exactly(tiny: Any, table: Any, tmp_path: Path) -> None:
    """Also through a file, which needs neither torch nor the model."""
    table.save(tmp_path / "table")
    read = TokenTable.load(tmp_path / "table")
    prompts = [tiny.tokenizer(p.prompt)["input_ids"] for p in take_in_turn(load_prompts(), 48)]
    for prompt, one in zip(prompts, dry_run(tiny.model, prompts), strict=True):
        for each in (table, read):
            np.testing.assert_array_equal(each.predict(PredictRequest(np.array(prompt))), one.footprint)


def test_it_says_what_it_is_of(tiny: Any, table: Any) -> None:
    config = tiny.model.config
    rows = table.rows
    assert rows.model == "coterie-tiny"
    assert rows.token_ids.tolist() == list(range(config.vocab_size))
    assert rows.experts.shape == (config.vocab_size, len(rows.layer_ids), config.num_experts_per_tok)
    assert (rows.weights == 1 << 15).all()
    assert (table.num_layers, table.smoothing) == (len(rows.layer_ids), 0)


@pytest.mark.parametrize("family", [*models.FAMILIES, *models.ALIKE])
def test_every_family(family: Any) -> None:
    model = models.build(family)
    table = dry_run_table(model)
    assert table.rows.model == family
    asked = requests(models.VOCAB)
    for tokens, one in zip(asked, dry_run(model, asked), strict=True):
        np.testing.assert_array_equal(table.predict(PredictRequest(np.array(tokens))), one.footprint)


def test_a_vocabulary_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("mixtral")
    whole = dry_run_table(model)
    monkeypatch.setattr(
        import_module("coterie.engines.transformers.dry_run"), "CHUNK_TOKENS", 50
    )  # 320 tokens: the last part is shorter
    parts = dry_run_table(model)
    np.testing.assert_array_equal(whole.rows.experts, parts.rows.experts)


def test_positions_in_the_embedding_are_refused() -> None:
    model = models.build("olmoe")
    places = torch.linspace(-3, 3, 256)[:, None] * torch.linspace(1, -1, 32)

    def add(_: Any, __: Any, out: Any) -> Any:
        return out + places[: out.shape[1]]

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        with pytest.raises(UnavailableError, match=r"'olmoe': .*% of a dry run's choices change with a token's place"):
            dry_run_table(model)
    finally:
        handle.remove()
    dry_run_table(model)

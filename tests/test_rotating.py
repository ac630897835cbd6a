"""`Basis.rotate`: a model and its rotated copy in every precision, kurtosis before and after, checkpoints."""

import errno
import json
from pathlib import Path

import handmade
import pytest
import torch
import transformers
import zoo
from torch import nn
from typer.testing import CliRunner

import mainstem
from mainstem.basis import rotated_losses
from mainstem.basis.rotated_checkpoint import write_checkpoint
from mainstem.basis.rotating import stream_sample
from mainstem.cli.app import app
from mainstem.errors import ChoiceError, MainstemError, NotFiniteError, RefusedError, TextError, UsageError
from mainstem.lab.texts import Text
from mainstem.report import as_html, as_json, as_text
from mainstem.session import Model

transformers.logging.set_verbosity_error()

WINDOW = 24


class Numbers(Text):
    """Random token ids that every tiny model knows."""

    count, seed = 48, 2

    def ids(self, model, most=None):
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(5, 190, (self.count,), generator=generator).tolist()[:most]


class Others(Numbers):
    """As many as are learned on."""

    count, seed = 256, 3


TEXT, LEARN_ON = Numbers("numbers", "a seed", ""), Others("others", "a seed", "")


def opened(family: str, **overrides) -> Model:
    return mainstem.open(zoo.build(family, **overrides))


def rotate(model: Model, kind: str = "hadamard", **options):
    return model.basis.rotate(kind, text=TEXT, window=WINDOW, learn_on=LEARN_ON, **options)


def loads(path: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(str(path)).eval()


@pytest.fixture(scope="module")
def llama() -> Model:
    return opened("llama")


@pytest.mark.parametrize("kind", ["random", "hadamard", "learned"])
def test_losses_and_logits_are_the_models_own(llama, kind):
    section = rotate(llama, kind).rotations
    assert section is not None and section.orthogonality < 1e-10
    rows = {(row.dtype, row.lifted): row for row in section.precisions}
    assert abs(rows["float64", True].change) < 1e-9 and rows["float64", True].logits < 1e-9
    assert abs(rows["float64", False].change) < 1e-6 and abs(rows["float32", False].change) < 1e-4
    assert section.certificate["logits"] < 1e-9
    assert {dtype for dtype, _ in rows} == {"float64", "float32", "bfloat16", "float16"}


def test_a_massive_dimension_is_spread_and_a_learned_rotation_spreads_it_further():
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 7] += 30
    session = mainstem.open(model)
    found = {}
    for kind in ("hadamard", "learned"):
        section = rotate(session, kind).rotations
        states = [row for row in section.points if row.kind == "stream"]
        assert all(row.kurtosis > 20 for row in states)
        found[kind] = sum(row.rotated for row in states) / len(states)
    assert found["learned"] < found["hadamard"] < 10


def test_the_sample_is_of_the_stream_without_first_positions(llama):
    from mainstem.basis.reference import reference

    on = reference(llama, TEXT, 48, WINDOW)
    sample = stream_sample(llama, on, rows=10)
    assert sample.shape == (10, 64) and sample.dtype == torch.float64
    assert torch.equal(sample, stream_sample(llama, on, rows=10))


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "mixtral"])
def test_a_checkpoint_gives_the_same_logits_in_plain_transformers(tmp_path, family):
    model = opened(family)
    section = rotate(model, out=tmp_path / "made").rotations
    ids = zoo.prompt()
    expected = zoo.logits(model.module, ids)
    seen = zoo.logits(loads(tmp_path / "made"), ids)
    assert (seen - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert section.checkpoint.logits <= 1e-5 and "model.safetensors" in section.checkpoint.files
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_tied_model_is_written_untied(tmp_path):
    model = opened("gemma", tie_word_embeddings=True)
    assert model.anatomy.tied
    rotate(model, out=tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert model.module.config.tie_word_embeddings is True
    assert not mainstem.open(loads(tmp_path / "made")).anatomy.tied


def test_a_gain_after_a_sublayer_is_turned_at_run_time_and_no_checkpoint_is_written(tmp_path):
    model = opened("gemma2")
    reading = rotate(model)
    assert len(reading.rotations.at_run_time) == 6 and "layernorm" in reading.notes[0]
    assert reading.rotations.certificate["logits"] < 1e-9
    with pytest.raises(RefusedError, match="post_attention_layernorm"):
        rotate(model, out=tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_of_transformers_is_rotated_but_not_written(tmp_path):
    model = mainstem.open(handmade.ALL["plain"]())
    made = model.basis.rotated("random", seed=3)
    ids = zoo.prompt()
    torch.testing.assert_close(made.logits(ids), model.module(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(RefusedError, match="Transformers' own classes"):
        rotate(model, out=tmp_path / "made")


def _kept_in_float32(module: nn.Module) -> nn.Module:
    """The model in bfloat16 as Transformers loads one: the frequencies of its positions stay in float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    return module


def test_a_bfloat16_model_keeps_its_float32_buffers_and_comes_back_equal(tmp_path):
    model = mainstem.open(_kept_in_float32(zoo.build("llama")))
    dtypes = {name: buffer.dtype for name, buffer in model.module.named_buffers()}
    assert set(dtypes.values()) == {torch.float32}
    for made in (model.basis.rotated(), model.basis.rotated(dtype=torch.float16)):
        assert {name: buffer.dtype for name, buffer in made.model.named_buffers()} == dtypes
        for name, buffer in model.module.named_buffers():
            assert torch.equal(made.model.get_buffer(name), buffer)
    section = rotate(model, out=tmp_path / "made").rotations
    assert section.checkpoint.logits == 0.0
    assert all(row.failure is None for row in section.precisions)


def test_a_computed_table_that_is_added_to_the_stream_follows_its_precision():
    rows = rotate(opened("musicgen")).rotations.precisions
    assert [row.failure for row in rows if row.dtype in ("float32", "bfloat16")] == [None, None]


def test_a_parameter_that_a_mixed_model_keeps_in_float32_is_float32_in_the_copy():
    module = _kept_in_float32(zoo.build("llama"))
    module.lm_head.weight.data = module.lm_head.weight.data.float()
    module.lm_head.register_forward_pre_hook(lambda head, inputs: (inputs[0].float(),))
    made = mainstem.open(module).basis.rotated()
    kinds = {name: parameter.dtype for name, parameter in made.model.named_parameters()}
    assert kinds == {name: parameter.dtype for name, parameter in module.named_parameters()}
    assert kinds["lm_head.weight"] == torch.float32


def test_a_copy_made_under_an_edit_has_no_hooks_and_is_the_unedited_models():
    model, ids = opened("llama"), zoo.prompt()
    expected = zoo.logits(model.module, ids)
    with model.edited(mainstem.Edit.zero("L0.mlp")):
        assert not torch.allclose(zoo.logits(model.module, ids), expected, atol=1e-3)
        made = model.basis.rotated("random")
    held = [hooks for part in made.model.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)]
    assert not any(held) and not any(part.__dict__.get("forward") for part in made.model.modules())
    torch.testing.assert_close(zoo.logits(made.model, ids), expected, rtol=1e-4, atol=1e-4)


def test_nothing_half_written_stays_when_the_disk_is_full(tmp_path, llama, monkeypatch):
    def full(self, place, **options):
        (Path(place) / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(llama.module), "save_pretrained", full)
    with pytest.raises(MainstemError, match="No space left"):
        write_checkpoint(llama, llama.basis.rotated(), tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_comes_back_otherwise_is_refused_with_the_tensor(tmp_path, llama, monkeypatch):
    def lossy(path, report, **options):
        module = loads(path)
        with torch.no_grad():
            module.model.layers[1].mlp.down_proj.weight.mul_(1.01)
        return module

    monkeypatch.setattr("mainstem.basis.rotated_checkpoint.read_directory", lossy)
    with pytest.raises(RefusedError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        write_checkpoint(llama, llama.basis.rotated(), tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_taken_or_missing_is_refused(tmp_path, llama):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="already"):
        rotate(llama, out=tmp_path / "file")
    with pytest.raises(UsageError, match="no such directory"):
        rotate(llama, out=tmp_path / "missing" / "made")


def test_float16_that_overflows_is_named_with_its_layer():
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3e5)
    rows = rotate(mainstem.open(model)).rotations.precisions
    half = next(row for row in rows if row.dtype == "float16")
    assert half.loss is None and "the model, L1.mlp" in half.failure
    assert all(row.failure is None for row in rows if row is not half)


def test_only_a_missing_kernel_makes_a_failure_of_a_precision(llama, monkeypatch):
    def raising(message):
        def evaluate(runs, on):
            raise RuntimeError(message)

        monkeypatch.setattr(rotated_losses, "evaluate", evaluate)
        return rotate(llama).rotations.precisions

    grouped = "Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double"
    for missing in ("addmm not implemented for Half", grouped):
        assert {row.failure for row in raising(missing)} == {missing}
    with pytest.raises(RuntimeError, match="out of memory"):
        raising("out of memory")


@pytest.mark.parametrize("family, match", [("qwen4_exp_text", "parallel residual streams"), ("zamba", "concatenate")])
def test_models_that_cannot_be_rotated_are_refused_by_name(family, match):
    with pytest.raises(MainstemError, match=match):
        _ = opened(family).basis.turning


def test_a_model_that_overflows_in_its_own_dtype_is_refused_with_the_place():
    model = zoo.build("llama", dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    with pytest.raises(NotFiniteError, match=r"NaN or infinity in the stream \(model\.layers\.1.*wider dtype"):
        _ = mainstem.open(model).basis.turning


def test_a_model_that_is_quantised_already_is_refused():
    model = zoo.build("llama")
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.mul(40).round().to(torch.int8), requires_grad=False)
    with pytest.raises(RefusedError, match="quantised already.*down_proj"):
        _ = mainstem.open(model).basis.turning


def test_unknown_words_and_short_texts_are_refused(llama):
    with pytest.raises(ChoiceError, match="hadamard"):
        rotate(llama, "hadamar")
    with pytest.raises(ChoiceError, match="hadamard"):
        llama.basis.rotated("spin")
    with pytest.raises(ChoiceError, match="rounding"):
        llama.basis.rotated("learned", objective="peak")
    with pytest.raises(TextError):
        llama.basis.rotate(text=TEXT, window=60)


def test_the_reading_is_a_document_a_table_and_a_page(tmp_path, llama):
    reading = rotate(llama, out=tmp_path / "made")
    document = json.loads(as_json(reading))
    assert document["command"] == "basis rotate" and document["rotations"]["rotation"] == "hadamard"
    text, page = as_text(reading), as_html(reading)
    for said in ("casts lifted", "bfloat16", "L2.mlp", "made"):
        assert said in text and said in page
    assert {row["section"] for row in reading.cells()} == {"rotations"}


def test_the_command_writes_a_directory_and_prints_its_table(tmp_path, llama, monkeypatch):
    monkeypatch.setattr("mainstem.open", lambda *args, **kwargs: llama)
    monkeypatch.setattr("mainstem.lab.texts.open_text", lambda source: TEXT)
    made = tmp_path / "made"
    run = CliRunner().invoke(
        app, ["basis", "rotate", "--out", str(made), "--window", str(WINDOW), "--format", "json", "--quiet"]
    )
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["rotations"]["checkpoint"]["path"] == str(made)
    assert (made / "config.json").is_file()
    again = CliRunner().invoke(app, ["basis", "rotate", "--rotation", "spin"])
    assert again.exit_code == 2 and "hadamard" in again.stderr

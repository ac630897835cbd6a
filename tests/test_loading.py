"""Opening a model: every kind of source works, and whatever is wrong with one is said in one message.

The models are tiny and random, saved as Transformers saves them and then damaged one way at a time.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mainstem.errors import (
    CacheError,
    ChoiceError,
    CorruptFileError,
    InterruptedDownloadError,
    LoadError,
    MainstemError,
    NoLanguageHeadError,
    NotAModelError,
    NotFiniteError,
    OfflineError,
    PickleRefusedError,
    RemoteCodeRefusedError,
    UsageError,
)
from mainstem.model import checkpoints, hub, loading
from mainstem.model.loading import load
from mainstem.model.placement import parse_dtype

SIZES = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32,
)  # fmt: skip
IDS = torch.tensor([[1, 2, 3, 4]])
WEIGHTS = "model.safetensors"


def quietly(message):
    pass


def build(seed=0, **changes):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).eval()


def logits(module):
    with torch.no_grad():
        return module(IDS).logits


def edit_json(path, **changes):
    fields = json.loads(path.read_text())
    fields.update(changes)
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def edit_weights(directory, change):
    weights = load_file(directory / WEIGHTS)
    change(weights)
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


def save_tokenizer(directory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["?", "the", "river", "main", "stem"])}, "?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(directory)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model with a tokenizer, not to be changed."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    build().save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def refused(error, source, **options):
    """The message with which a source is refused; it names an error of exactly this class."""
    with pytest.raises(MainstemError) as caught:
        load(source, report=quietly, **options)
    assert type(caught.value) is error, repr(caught.value)
    message = str(caught.value)
    assert "\n" not in message and caught.value.remedy
    return message


# --- a directory ------------------------------------------------------------------------------------------


def test_a_directory(saved):
    loaded = load(saved, report=quietly)
    assert torch.equal(logits(loaded.module), logits(build()))
    assert not any(part.training for part in loaded.module.modules())
    assert (loaded.name, loaded.source, loaded.revision) == ("tiny", str(saved), None)
    assert (loaded.dtype, loaded.device) == ("float32", "cpu")
    assert loaded.tokenizer("main stem").input_ids == [3, 4]


def test_a_directory_by_a_relative_path(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    assert load("tiny", report=quietly).name == load("./tiny/", report=quietly).name == "tiny"
    monkeypatch.chdir(saved)
    assert load(".", report=quietly).name == "tiny"


def test_sharded_weights(tmp_path):
    build().save_pretrained(tmp_path / "sharded", max_shard_size="5KB")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 1
    assert torch.equal(logits(load(tmp_path / "sharded", report=quietly).module), logits(build()))
    shards[1].unlink()
    assert shards[1].name in refused(CorruptFileError, tmp_path / "sharded")


def test_nothing_is_printed(saved, capfd):
    load(saved, report=quietly)
    assert capfd.readouterr() == ("", "")


def test_tied_embeddings_stay_tied_and_a_base_model_that_ties_them_is_whole(tmp_path):
    module = build(tie_word_embeddings=True)
    module.model.save_pretrained(tmp_path / "base")
    loaded = load(tmp_path / "base", report=quietly).module
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(logits(loaded), logits(module))


def test_a_directory_without_a_tokenizer_is_told(saved, directory):
    for file in directory.glob("tokenizer*"):
        file.unlink()
    messages = []
    assert load(directory, report=messages.append).tokenizer is None
    assert len(messages) == 1 and "token ids" in messages[0]
    assert load(directory, tokenizer=saved, report=quietly).tokenizer("main").input_ids == [3]
    given = load(saved, report=quietly).tokenizer
    assert load(directory, tokenizer=given, report=quietly).tokenizer is given


def test_a_damaged_tokenizer_is_told(directory):
    (directory / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused(CorruptFileError, directory)


def test_unused_tensors_are_told(directory):
    edit_weights(directory, lambda weights: weights.update(score=torch.ones(2, 16)))
    messages = []
    load(directory, report=messages.append)
    assert len(messages) == 1 and "score" in messages[0]


# --- what is no model -------------------------------------------------------------------------------------


def test_what_holds_no_model(tmp_path, directory):
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(NotAModelError, tmp_path / "empty")
    assert "no such file" in refused(NotAModelError, tmp_path / "absent")
    assert "no such file" in refused(NotAModelError, "./absent")
    assert "no such file" in refused(NotAModelError, "absent.gguf")
    assert str(directory) in refused(NotAModelError, directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    assert "no weights" in refused(NotAModelError, directory)
    assert "empty" in refused(UsageError, " ")


@pytest.mark.parametrize(
    "text, error, said",
    [
        ("{", CorruptFileError, "JSON"),
        ("[]", CorruptFileError, "JSON object"),
        ("{}", NotAModelError, "does not say"),
        ('{"model_type": "no_such_thing"}', NotAModelError, "no_such_thing"),
        ('{"model_type": ["list"]}', NotAModelError, "list"),
        ('{"model_type": "llama", "hidden_size": "wide"}', LoadError, "Transformers could not"),
    ],
)
def test_a_configuration_that_says_nothing_useful(directory, text, error, said):
    (directory / "config.json").write_text(text)
    assert said in refused(error, directory)


@pytest.mark.parametrize("length", [0, 4, 100, -100, -1])
def test_truncated_weights_are_named(directory, length):
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:length])
    assert str(directory / WEIGHTS) in refused(CorruptFileError, directory)


def test_missing_weights_are_an_error(directory):
    edit_weights(directory, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert "layers.1.mlp.up_proj.weight" in refused(CorruptFileError, directory)


def test_weights_of_another_shape_are_an_error(directory):
    edit_json(directory / "config.json", intermediate_size=48)
    assert "shapes" in refused(CorruptFileError, directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(directory, value):
    name = "model.layers.1.self_attn.o_proj.weight"
    edit_weights(directory, lambda weights: weights[name].view(-1)[-1:].fill_(value))
    assert name in refused(NotFiniteError, directory)


def test_a_pickle_is_refused_unless_asked_for(directory):
    torch.save(build().state_dict(), directory / "pytorch_model.bin")
    assert torch.equal(logits(load(directory, report=quietly).module), logits(build()))
    (directory / WEIGHTS).unlink()
    assert "pytorch_model.bin" in refused(PickleRefusedError, directory)
    assert torch.equal(logits(load(directory, allow_pickle=True, report=quietly).module), logits(build()))


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OurConfig(LlamaConfig):
    model_type = "ours"
class OurModel(LlamaForCausalLM):
    config_class = OurConfig
"""


def test_code_of_the_checkpoints_own_is_refused_unless_asked_for(directory, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (directory / "ours.py").write_text(REMOTE)
    auto_map = {"AutoConfig": "ours.OurConfig", "AutoModelForCausalLM": "ours.OurModel"}
    edit_json(directory / "config.json", model_type="ours", architectures=["OurModel"], auto_map=auto_map)
    assert "trust_remote_code" in refused(RemoteCodeRefusedError, directory)
    loaded = load(directory, trust_remote_code=True, report=quietly)
    assert type(loaded.module).__name__ == "OurModel" and torch.equal(logits(loaded.module), logits(build()))
    edit_json(directory / "config.json", auto_map={"AutoConfig": "ours.OurConfig"})
    refused(NoLanguageHeadError, directory, trust_remote_code=True)


def test_code_is_not_run_where_transformers_has_the_model(directory):
    edit_json(directory / "config.json", auto_map={"AutoModelForCausalLM": "absent.Model"})
    assert type(load(directory, report=quietly).module) is transformers.LlamaForCausalLM


# --- another sort of model --------------------------------------------------------------------------------


T5 = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
BART = dict(
    vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
)  # fmt: skip
BERT = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
VIT = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=8,
    patch_size=4,
)


@pytest.mark.parametrize(
    "config, model, sizes",
    [
        ("T5Config", "T5ForConditionalGeneration", T5),
        ("BartConfig", "BartForConditionalGeneration", BART),
        ("ViTConfig", "ViTForImageClassification", VIT),
        ("BertConfig", "BertForMaskedLM", BERT),
        ("BertConfig", "BertModel", BERT),
        ("LlamaConfig", "LlamaModel", SIZES),
        ("LlamaConfig", "LlamaForSequenceClassification", SIZES),
        ("LlamaConfig", "LlamaForSequenceClassification", {**SIZES, "tie_word_embeddings": True}),
    ],
)
def test_models_that_predict_no_next_token(tmp_path, config, model, sizes):
    module = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    module.save_pretrained(tmp_path / "model")
    refused(NoLanguageHeadError, tmp_path / "model")
    if not model.startswith(("BertForMasked",)):
        refused(NoLanguageHeadError, module)


def test_the_decoder_of_an_encoder_decoder_is_a_language_model(tmp_path):
    module = transformers.BartForCausalLM(transformers.BartConfig(**BART)).eval()
    module.save_pretrained(tmp_path / "decoder")
    assert torch.equal(logits(load(tmp_path / "decoder", report=quietly).module), logits(module))


# --- a GGUF file ------------------------------------------------------------------------------------------


def write_gguf(path, architecture="llama", leave_out=(), merge=None, **changes):
    """A tiny GGUF file of `build`'s weights, with the smallest tokenizer that Transformers converts."""
    import gguf

    module = build(**changes)
    config = module.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(33 + i) for i in range(config.vocab_size)]
    letters[-1] = letters[0] + letters[1]
    writer.add_token_list(letters)
    writer.add_token_merges([merge or f"{letters[0]} {letters[1]}"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in module.state_dict().items():
        if name not in leave_out:
            array = rotated(name, weight, config).float().numpy()
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return module


def rotated(name, weight, config):
    """Query and key rows in the file's order: its rotary embedding pairs neighbours, not halves."""
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads if "k_proj" in name else 0
    if not heads:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def test_a_gguf_file(tmp_path):
    module = write_gguf(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf", report=quietly)
    assert torch.equal(logits(loaded.module), logits(module))
    assert (loaded.name, loaded.dtype) == ("tiny", "float32") and loaded.tokenizer("AB").input_ids
    loaded.module.save_pretrained(tmp_path / "dense")  # it is an ordinary dense model from here on
    assert torch.equal(logits(load(tmp_path / "dense", report=quietly).module), logits(module))
    assert load(tmp_path / "tiny.gguf", dtype="bf16", report=quietly).dtype == "bfloat16"


@pytest.mark.parametrize("length", [5, 30, 200, 1500, -3000, -4])
def test_a_truncated_gguf_file_is_named(tmp_path, length):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:length])
    assert str(path) in refused(CorruptFileError, path)


def test_what_is_no_gguf_file(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("a poem")
    assert "does not start" in refused(NotAModelError, path)
    path.write_text("")
    refused(NotAModelError, path)
    write_gguf(path, architecture="no_such_thing")
    assert "no_such_thing" in refused(NotAModelError, path)


def test_a_gguf_file_with_a_damaged_tokenizer(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, merge="A B")  # merges to a token that is not in the vocabulary
    message = refused(CorruptFileError, path)
    assert str(path) in message and "tokenizer" in message


def test_a_gguf_file_that_lacks_weights(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, leave_out=["model.layers.0.mlp.up_proj.weight"])
    refused(CorruptFileError, path)


# --- a module ---------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments, **options):
        return self.inner(*arguments, **options)


def test_a_module_is_used_in_place_and_unchanged(saved):
    module = build().double()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in module.named_parameters()}
    tokenizer = load(saved, report=quietly).tokenizer
    loaded = load(module, tokenizer=tokenizer, report=quietly)
    assert loaded.module is module and loaded.tokenizer is tokenizer
    assert (loaded.dtype, loaded.name, loaded.source) == (
        "float64",
        "LlamaForCausalLM",
        "module:LlamaForCausalLM",
    )
    assert identities == {name: id(tensor) for name, tensor in module.named_parameters()}
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_wrappers_and_adapters_are_used_as_they_are():
    import peft

    wrapped = Wrapper(build()).eval()
    assert load(wrapped, report=quietly).module is wrapped
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(build(), config).eval()
    assert load(adapted, report=quietly).module is adapted


def test_a_module_that_would_have_to_be_changed_is_refused():
    module = build()
    module.model.layers[1].train()
    assert "model.layers.1" in refused(UsageError, module) and module.model.layers[1].training
    module.eval()
    for option in ({"dtype": "bf16"}, {"device": "cpu"}, {"device_map": "auto"}, {"revision": "main"}):
        assert next(iter(option)) in refused(UsageError, module, **option)
    with torch.no_grad():
        module.lm_head.weight[3, 3] = float("nan")
    assert "lm_head.weight" in refused(NotFiniteError, module)
    refused(NotAModelError, nn.Identity().eval())


# --- an adapter on disk -----------------------------------------------------------------------------------


@pytest.fixture
def adapter(saved, tmp_path):
    import peft

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(saved)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    module = peft.get_peft_model(base, config).eval()
    module.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", logits(module)


def test_an_adapter_is_put_into_its_base(adapter, saved):
    directory, expected = adapter
    loaded = load(directory, report=quietly)
    assert torch.equal(logits(loaded.module), expected) and not torch.equal(expected, logits(build()))
    assert loaded.name == "adapter" and loaded.tokenizer("main").input_ids == [3]
    assert not any(part.training for part in loaded.module.modules())


def test_what_is_wrong_with_an_adapter(adapter, monkeypatch):
    directory, _ = adapter
    weights = directory / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    assert str(directory) in refused(CorruptFileError, directory)
    weights.unlink()
    refused(CorruptFileError, directory)
    (directory / "adapter_model.bin").write_bytes(b"")
    refused(PickleRefusedError, directory)
    weights.write_bytes(content)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install peft" in refused(LoadError, directory)
    monkeypatch.undo()
    edit_json(directory / "adapter_config.json", base_model_name_or_path=None)
    refused(NotAModelError, directory)


# --- precision and place ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, dtype",
    [
        (None, "float32"), ("float32", "float32"), ("fp32", "float32"), ("FP64", "float64"),
        ("double", "float64"), ("bf16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("half", "float16"),
        (torch.float16, "float16"), ("auto", "bfloat16"),
    ],
)  # fmt: skip
def test_dtypes(tmp_path, given, dtype):
    build().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    loaded = load(tmp_path / "half", dtype=given, report=quietly)
    assert loaded.dtype == dtype == str(loaded.module.lm_head.weight.dtype).removeprefix("torch.")


@pytest.mark.parametrize("given", ["flaot32", "int8", "", torch.int64])
def test_unknown_dtypes(given):
    with pytest.raises(ChoiceError, match="dtype"):
        parse_dtype(given)


def test_devices(saved):
    assert load(saved, device="cpu", report=quietly).device == "cpu"
    assert load(saved, device=torch.device("cpu"), report=quietly).device == "cpu"
    assert load(saved, device_map="cpu", report=quietly).dtype == "float32"
    assert load(saved, device_map={"": "cpu"}, report=quietly).device == "cpu"
    assert "cpu" in refused(ChoiceError, saved, device="warp")
    assert "device" in refused(ChoiceError, saved, device="cuda:99")
    refused(UsageError, saved, device="cpu", device_map="auto")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_checkpoints_own_dtype_is_kept_on_accelerators(tmp_path):
    build().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    loaded = load(tmp_path / "half", device="cuda", report=quietly)
    assert (loaded.dtype, loaded.device) == ("bfloat16", "cuda:0")
    assert load(tmp_path / "half", device="cuda:0", dtype="fp32", report=quietly).dtype == "float32"


def test_attention_implementations(saved):
    assert load(saved, attn_implementation="eager", report=quietly).module.config._attn_implementation == "eager"
    assert "eager or sdpa" in refused(LoadError, saved, attn_implementation="none_such")


def test_too_little_memory_is_told(saved, monkeypatch):
    def full(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(checkpoints.AutoModelForCausalLM, "from_pretrained", full)
    assert "memory" in refused(LoadError, saved)


# --- the Hub ----------------------------------------------------------------------------------------------


def answer(error):
    def fail(*arguments, **options):
        raise error

    return fail


def hub_error(kind):
    # Without the response that its constructor takes, which is of one HTTP library or another by version.
    error = kind.__new__(kind)
    error.args = ("404 Client Error",)
    return error


def test_a_hub_id(saved, monkeypatch, tmp_path):
    seen = {}
    snapshot = Path(shutil.copytree(saved, tmp_path / "0123abc"))

    def download(name, **options):
        seen.update(options, name=name)
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    loaded = load("owner/tiny", revision="v1", report=quietly)
    assert (loaded.name, loaded.source, loaded.revision) == ("tiny", "owner/tiny", "0123abc")
    assert torch.equal(logits(loaded.module), logits(build()))
    assert (seen["name"], seen["revision"]) == ("owner/tiny", "v1")
    assert not {"*.bin", "*.py"} & set(seen["allow_patterns"]) and "*.safetensors" in seen["allow_patterns"]
    load("owner/tiny", allow_pickle=True, trust_remote_code=True, report=quietly)
    assert {"*.bin", "*.py"} <= set(seen["allow_patterns"])


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda e: e.LocalEntryNotFoundError("no"), OfflineError),
        (lambda e: e.OfflineModeIsEnabled("no"), OfflineError),
        (lambda e: hub_error(e.RepositoryNotFoundError), NotAModelError),
        (lambda e: hub_error(e.RevisionNotFoundError), NotAModelError),
        (lambda e: hub_error(e.GatedRepoError), LoadError),
        (lambda e: hub_error(e.HfHubHTTPError), LoadError),
        (lambda e: ConnectionResetError(104, "reset"), InterruptedDownloadError),
        (lambda e: RuntimeError("read timed out"), InterruptedDownloadError),
        (lambda e: OSError(28, os.strerror(28)), CacheError),
        (lambda e: PermissionError(13, os.strerror(13)), CacheError),
    ],
)
def test_what_the_hub_answers_becomes_one_message(monkeypatch, make, error):
    import huggingface_hub.errors

    monkeypatch.setattr(hub, "snapshot_download", answer(make(huggingface_hub.errors)))
    assert "owner/tiny" in refused(error, "owner/tiny")


def test_what_is_neither_a_directory_nor_a_hub_id():
    assert "no Hub id" in refused(NotAModelError, "not a/hub id/at all")


def test_a_revision_is_for_the_hub(saved):
    assert "revision" in refused(UsageError, saved, revision="main")
    assert "revision" in refused(UsageError, "demo", revision="main")


# --- demo, and the house rule -----------------------------------------------------------------------------


def test_a_damaged_demo_is_made_again(saved, tmp_path, monkeypatch):
    directory = Path(shutil.copytree(saved, tmp_path / "demo"))
    calls = []

    def ensure(report):
        calls.append(report)
        if len(calls) == 2:
            shutil.copy(saved / WEIGHTS, directory / WEIGHTS)
        return directory

    (directory / WEIGHTS).write_bytes(b"rotten")
    monkeypatch.setattr(loading.demo, "ensure", ensure)
    loaded = load(report=quietly)
    assert len(calls) == 2 and torch.equal(logits(loaded.module), logits(build()))
    assert loaded.name == "SmolLM2-135M-Instruct" and loaded.source == "demo" and loaded.revision


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "bloom", "falcon", "gemma3_text", "mamba", "olmoe", "opt", "phi", "xglm"])
def test_other_families_make_the_round_trip(family, tmp_path):
    assert family in CONFIG_MAPPING
    import zoo

    module = zoo.build(family)
    module = (module[0] if isinstance(module, tuple) else module).eval()
    module.save_pretrained(tmp_path / family)
    loaded = load(tmp_path / family, report=quietly)
    weights, ours = module.state_dict(), loaded.module.state_dict()
    assert weights.keys() == ours.keys() and all(torch.equal(weights[name], ours[name]) for name in weights)
    # Kernels round differently where weights lie differently in memory, mapped from a file or not.
    torch.testing.assert_close(logits(loaded.module), logits(module))

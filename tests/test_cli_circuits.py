"""`mainstem circuits` by a skip trigram, and what is refused of `heads`, `circuits` and `subspace`."""

import json

import pytest
import torch
import transformers

from tests.test_cli import refused, run, save_byte_tokenizer, saved  # noqa: F401 (fixtures)

ASKED = ("--source", "a", "--destination", "id:7", "--predicts", " m")
"""Of one token each of the tiny model's tokenizer."""


def test_all_heads_by_a_skip_trigram(run):  # noqa: F811
    status, out, err = run("circuits", *ASKED, "--top", 3, "--format", "json")
    assert status == 0, err
    document = json.loads(out)
    assert document["schema"] == "mainstem/trigram/1" and document["command"] == "circuits"
    assert (document["source"], document["out"], document["top"]) == ("a", " m", 3)
    assert {row["head"] for row in document["heads"]} == {f"L{layer}H{head}" for layer in (0, 1) for head in range(4)}
    scores = [row["score"] for row in document["heads"]]
    assert scores == sorted(scores, reverse=True) and document["factors"]["holds"]


def test_the_table_and_the_page_name_the_skip_trigram(run, tmp_path):  # noqa: F811
    status, out, err = run("circuits", *ASKED, "--top", 2)
    assert status == 0, err
    assert "[a] ... [" in out and "of 8 heads" in out
    rows = [line for line in out.splitlines() if line.split()[:1] and line.split()[0].startswith("L") and "H" in line]
    assert len([line for line in rows if line.split()[0][1].isdigit()]) == 2
    page = tmp_path / "trigram.html"
    assert run("circuits", *ASKED, "--out", page)[0] == 0 and "</html>" in page.read_text()


@pytest.mark.parametrize("words", [("--composition",), ("L1H2", "--composition", "--kind", "neuron")])
def test_composition_as_table_and_page(run, tmp_path, words):  # noqa: F811
    status, out, err = run("circuits", *words)
    assert status == 0, err
    assert "||R W||" in out and "random rotation" in out
    page = tmp_path / "composition.html"
    assert run("circuits", *words, "--out", page)[0] == 0
    text = page.read_text()
    assert "</html>" in text and "<svg" in text and "http://" not in text.replace("http://www.w3.org", "")


def test_one_head_by_a_skip_trigram(run):  # noqa: F811
    status, out, err = run("circuits", "L1H2", *ASKED, "--format", "json")
    assert status == 0, err
    assert json.loads(out)["asked"]["source"] == "a"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["circuits"], 2, "one thing"),
        (["circuits", *ASKED[:2]], 2, "all of --source"),
        (["circuits", "--source", "zzz", *ASKED[2:]], 2, "token"),
        (["circuits", "--source", "id:999", *ASKED[2:]], 2, "999"),
        (["circuits", *ASKED, "--embedding", "normed"], 2, "one head"),
        (["circuits", *ASKED, "--composition"], 2, "one thing"),
        (["circuits", "L9H0"], 2, "L9H0"),
        (["circuits", "L0H9"], 2, "L0H9"),
        (["circuits", "L-1H0"], 2, "L-1H0"),
        (["circuits", "L0.mlp"], 2, "no head"),
        (["circuits", "L0H1", "--offset", "32"], 2, "context"),
        (["circuits", "--composition", "--offset", "32"], 2, "context"),
        (["circuits", "--composition", "--format", "parquet"], 2, "--out"),
        (["circuits", "L0H1", "--kind", "q"], 2, "--composition"),
        (["circuits", "L9H9", "--composition", "--kind", "neuron"], 2, "L9H9"),
        (["heads", "--head", "L9H0"], 2, "L9H0"),
        (["heads", "--head", "L0.mlp"], 2, "L0.mlp"),
        (["heads", "--format", "parquet"], 2, "--out"),
        (["subspace", "L9H0.write", "L1H0.key"], 2, "L9H0"),
        (["subspace", "L0H0.up", "L1H0.key"], 2, "no side 'up'"),
        (["subspace", "L0H0", "L1H0.key"], 2, "L0H0"),
        (["subspace", "L-1H0.write", "L1H0.key"], 2, "L-1H0"),
        (["subspace", "L0H0.write+", "L1H0.key"], 2, ""),
        (["subspace", "L0H0.write", "L1H0.key", "--energy", "1.5"], 2, "energy"),
        (["subspace", "L0H0.write", "L1H0.key", "--rank", "99"], 2, ""),
        (["subspace", "L0H0.write", "L1H0.key", "--offset", "32"], 2, "context"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_wrong_is_said_in_one_message(run, words, status, said):  # noqa: F811
    refused(run(*words), status, said)


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A head that writes nothing."""
    directory = tmp_path_factory.mktemp("models") / "silent"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        module.model.layers[0].self_attn.o_proj.weight[:, :4] = 0
    module.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


def test_a_head_that_writes_nothing_is_said(run, silent):  # noqa: F811
    refused(run("circuits", "L0H0", model=silent), 2, "OV circuit is zero")
    refused(run("subspace", "L0H0.write", "L1H0.key", model=silent), 2, "L0H0")
    status, out, err = run("circuits", "--composition", "--format", "json", model=silent)
    assert status == 0, err
    assert {row["kind"]: row["undefined"] for row in json.loads(out)["kinds"]} == {"q": 4, "k": 4, "v": 4}


def test_weights_that_are_not_numbers_are_said(run, silent, tmp_path):  # noqa: F811
    module = transformers.LlamaForCausalLM.from_pretrained(silent)
    with torch.no_grad():
        module.model.layers[1].self_attn.q_proj.weight[0] = float("nan")
    module.save_pretrained(tmp_path / "nan")
    save_byte_tokenizer(tmp_path / "nan")
    for words in (["heads"], ["circuits", "L0H1"], ["circuits", "--composition"], ["subspace", "--bandwidth"]):
        refused(run(*words, model=tmp_path / "nan"), 1, "layers.1.self_attn.q_proj")

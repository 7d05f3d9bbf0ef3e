"""Pictures of weights, seen from Python: what is drawn, what a page holds and how exactly, what the command writes, and every error."""

import base64
import json
import re
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn

import tiled_attention as ta
from tiled_attention.__main__ import main
from tiled_attention.compare.models import sentence_model
from tiled_attention.plot import encode
from tiled_attention.plot.command import token_labels
from tiled_attention.plot.layers import block_means, layers_of

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


def weights_of(*shape: int, mask: ta.Mask | None = None, scale: float = 1.0) -> torch.Tensor:
    """(..., num_heads, seqlen_q, seqlen_kv)"""
    *lead, seqlen_q, seqlen_kv = shape
    query, key = scale * torch.randn(*lead or [1], seqlen_q, 16), torch.randn(*lead or [1], seqlen_kv, 16)
    return ta.attention_weights(query, key, mask=mask).reshape(shape)


class Contents(HTMLParser):
    """The scripts and all other text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.tags: list[tuple[str, dict]] = []
        self.title = ""
        self._open: str | None = None
        self.feed(page)
        self.header = json.loads(self.scripts["data"])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id", "script") if tag == "script" else tag
        if tag == "script":
            self.scripts[self._open] = ""

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open in self.scripts:
            self.scripts[self._open] += data
        elif self._open == "title":
            self.title += data

    def blob(self, name: str) -> bytes:
        return zlib.decompress(base64.b64decode(self.scripts[name]), -15)

    def map(self, layer: int, head: int) -> np.ndarray:
        """What the page says of a head, by the description in encode.py: NaN where nothing is known."""
        header = self.header
        rows, keys, data = header["seqlen_q"], header["seqlen_kv"], self.blob(f"map-{layer}-{head}")
        largest, codes = np.frombuffer(data[: 4 * rows], "<f4"), np.frombuffer(data[4 * rows :], np.uint8)
        found = np.full((rows, keys), np.nan)
        at = 0
        for i in range(rows):
            if header["kept"] == "largest":
                count, size = header["count"], rows * header["count"]
                planes = [codes[size * (1 + n) :][i * count :][:count].astype(int) for n in range(header["planes"])]
                places = sum(plane << 8 * n for n, plane in enumerate(planes))
                row = codes[i * count :][:count]
            else:
                places = range(min(max(i + keys - rows + 1, 0), keys) if header["causal"] else keys)
                row = codes[at : at + len(places)]
                at += len(places)
            found[i, places] = largest[i] * (row / header["levels"]) ** (1 / header["power"])
        return found


# Heatmap.


def test_one_map_has_its_weights_labels_and_colour_bar():
    weights = weights_of(5, 5)
    axes = ta.plot.heatmap(weights, tokens=["the", "$cat$", "s\nat", "on", "a very long token it is"], title="a head")
    image = axes.images[0]
    assert np.allclose(image.get_array(), weights) and image.get_clim() == (0, pytest.approx(weights.max().item()))
    assert image.get_extent() == [0, 5, 5, 0]  # rows down, keys across, a token from i to i + 1
    labels = ["the", "$cat$", "s⏎at", "on", "a very long tok…"]
    assert [text.get_text() for text in axes.get_xticklabels()] == labels == [text.get_text() for text in axes.get_yticklabels()]
    assert not any(text.get_parse_math() for text in axes.get_xticklabels() + axes.get_yticklabels())
    assert axes.get_title() == "a head" and axes.figure.axes[-1].get_ylabel() == "weight"
    axes.figure.canvas.draw()


def test_colours_grow_darker_evenly_in_grey():
    axes = ta.plot.heatmap(weights_of(3, 3))
    red, green, blue = axes.images[0].cmap(np.linspace(0, 1, 64))[:, :3].T
    linear = [np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4) for part in (red, green, blue)]
    lightness = 116 * np.cbrt(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]) - 16  # CIE L*, above 8
    steps = -np.diff(lightness[:56])
    assert steps.min() > 0.5 * steps.mean() and steps.max() < 1.5 * steps.mean()


def test_grid_of_layers_and_heads():
    weights = weights_of(3, 4, 6, 6)
    grid = ta.plot.heatmap(weights, layers=[2, 0], heads=[1, -1])
    assert grid.shape == (2, 2)
    for row, layer in enumerate((2, 0)):
        for column, head in enumerate((1, 3)):
            assert np.allclose(grid[row, column].images[0].get_array(), weights[layer, head])
    assert [axes.get_title() for axes in grid[0]] == ["head 1", "head 3"]
    assert [axes.get_ylabel() for axes in grid[:, 0]] == ["layer 2", "layer 0"]
    assert len({axes.images[0].get_clim() for axes in grid.flat}) == 1
    given = pyplot.subplots(1, 4)[1]
    assert ta.plot.heatmap(weights[0], axes=given)[0, 3] is given[3]
    assert ta.plot.heatmap(weights[0, 0].numpy(), axes=given[1]) is given[1]


def patch(axes, kind):
    return [part for part in [*axes.patches, *axes.collections] if part.get_gid() == kind]


def test_hidden_pairs_are_hatched():
    mask = ta.Causal() & ta.SlidingWindow(3, 0)
    weights = weights_of(2, 9, 12, mask=mask)
    for axes in ta.plot.heatmap(weights, mask=mask).flat:
        (hidden,) = patch(axes, "hidden")
        assert hidden.get_hatch()
        inside = np.array([[hidden.get_path().contains_point((j + 0.5, i + 0.5)) for j in range(12)] for i in range(9)])
        assert np.array_equal(inside, ~mask.dense(9, 12).numpy())
    per_head = torch.stack([mask.dense(9, 12), torch.ones(9, 12).bool()])
    first, second = ta.plot.heatmap(weights, mask=per_head)[0]
    assert patch(first, "hidden") and not patch(second, "hidden")


def test_causal_triangle_is_found_without_a_mask():
    causal = ta.plot.heatmap(weights_of(4, 6, mask=ta.Causal()))
    (hidden,) = patch(causal, "hidden")
    assert hidden.get_path().contains_point((3.5, 0.5)) and not hidden.get_path().contains_point((2.5, 0.5))
    assert not patch(ta.plot.heatmap(weights_of(4, 6)), "hidden")
    one_hot = torch.eye(4)[[1, 0, 3, 2]]  # zeros, but not a triangle of them
    assert not patch(ta.plot.heatmap(one_hot), "hidden")


def test_tiles_that_a_kernel_visits_are_outlined():
    axes = ta.plot.heatmap(weights_of(10, 10, mask=ta.Causal()), mask=ta.Causal(), tile=(4, 5))
    (tiles,) = patch(axes, "tiles")
    sides = {tuple(map(tuple, segment.tolist())) for segment in tiles.get_segments()}
    assert ((5, 0), (5, 4)) in sides and ((5, 4), (10, 4)) in sides  # rows 4 to 7 see key 5
    assert ((10, 0), (10, 4)) not in sides and len(sides) == 15  # five tiles of six, whose inner sides are shared


def test_labels_are_thinned_and_long_maps_are_means():
    tokens = [f"token{i}" for i in range(200)]
    shown = [text.get_text() for text in ta.plot.heatmap(weights_of(200, 200), tokens=tokens).get_xticklabels()]
    assert 10 <= len(shown) <= 45 and shown[:2] == ["token0", "token5"]
    mask = ta.Causal()
    weights = weights_of(1100, 1100, mask=mask)
    axes = ta.plot.heatmap(weights, mask=mask, tile=256)
    picture = axes.images[0].get_array()
    assert picture.shape == (220, 220)
    assert picture[100, 50] == pytest.approx(weights[500:505, 250:255].mean().item())
    (hidden,) = patch(axes, "hidden")
    assert hidden.get_path().contains_point((1000, 60)) and not hidden.get_path().contains_point((60, 1000))


def test_block_means_have_the_mean_of_what_is_there():
    weights = weights_of(2, 7, 10).numpy()
    means = block_means(weights, 3)
    assert means.shape == (2, 3, 3)
    assert np.allclose(means[1, 2, 2], weights[1, 6:, 8:].mean()) and np.allclose(means[0, 0, 1], weights[0, :3, 4:8].mean())
    assert np.array_equal(block_means(weights, 128), weights)


def recorded():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad(), ta.record_attention(model, heads=[1, 3]) as recording:
        model(torch.randn(2, 9, 16))
    return recording


def test_a_recording_is_drawn_and_its_heads_keep_their_numbers():
    recording = recorded()
    grid = ta.plot.heatmap(recording, heads=[3])
    for row, call in enumerate(recording):
        assert np.allclose(grid[row, 0].images[0].get_array(), call.weights()[0, 1], atol=1e-6)
    assert grid[0, 0].get_title() == "head 3"
    page = Contents(str(ta.plot.html(recording)))
    assert [layer["heads"] for layer in page.header["layers"]] == [[1, 3]] * 2
    assert [layer["name"] for layer in page.header["layers"]] == recording.names
    assert np.allclose(page.map(1, 0), recording[1].weights()[0, 0], atol=page.header["error"]["largest"] * 1.01)
    assert np.allclose(Contents(str(ta.plot.html(recording[1]))).map(0, 1), recording[1].weights()[0, 1], atol=5e-3)
    with pytest.raises(IndexError, match=r"heads must be among \[1, 3\], got 0"):
        ta.plot.heatmap(recording, heads=0)


# Page.


@pytest.mark.parametrize("mask", [None, ta.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 1)], ids=str)
def test_page_holds_the_weights_within_the_error_it_states(lengths, mask):
    weights = weights_of(2, 3, *lengths, mask=mask, scale=3.0).double()
    page = ta.plot.html(weights)
    contents = Contents(str(page))
    seen = np.ones(lengths, bool) if mask is None or 1 in lengths else mask.dense(*lengths).numpy()
    assert contents.header["causal"] == (not seen.all())
    for layer in range(2):
        for head in range(3):
            found, exact = contents.map(layer, head), weights[layer, head].numpy()
            assert np.array_equal(np.isnan(found), ~seen)
            difference = np.abs(found - exact)[seen]
            assert difference.max() <= page.error["largest"] + 1e-7  # float32 of the weights
            assert difference.max() <= 1 / 255  # twice half a step of the square root
            rows = exact.max(-1) > 0
            assert np.allclose(np.nanmax(np.where(np.isnan(found), -1, found), -1)[rows], exact.max(-1)[rows], rtol=1e-6)


def test_overview_holds_the_means():
    weights = weights_of(2, 3, 100, 70).float()
    contents = Contents(str(ta.plot.html(weights)))
    means = block_means(weights.numpy(), 64)
    for layer, about in enumerate(contents.header["layers"]):
        assert about["blocks"] == [50, 35]
        codes = np.frombuffer(contents.blob(f"overview-{layer}"), np.uint8).reshape(3, 50, 35)
        found = (codes / 255) ** 2 * np.array(about["largest_mean"])[:, None, None]
        assert np.abs(found - means[layer]).max() <= means.max() / 255


@pytest.mark.parametrize("budget", [8_000_000, 2_500_000, 1_400_000])
def test_fewer_bytes_make_coarser_steps_and_never_more_than_the_budget(budget):
    layers = layers_of(weights_of(1, 8, 512, 512).numpy())
    encoded = encode.encode(layers, budget)
    assert encoded.size() <= budget and encoded.size() >= 0.6 * min(budget, 2_700_000)
    assert encoded.header["kept"] == "all"
    half_step = 0.5 / encoded.header["levels"]
    assert encoded.header["error"]["largest_of_row"] <= (half_step if encoded.header["power"] == 1 else 2 * half_step) * 1.001
    assert encoded.header["levels"] >= {8_000_000: 255, 2_500_000: 63, 1_400_000: 15}[budget]


def test_where_not_all_fits_the_largest_weights_of_each_row_are_kept():
    weights = weights_of(1, 2, 700, 700, mask=ta.Causal())
    encoded = encode.encode(layers_of(weights), 100_000)
    header = encoded.header
    assert header["causal"] and not encode._encode_largest(layers_of(weights.transpose(-1, -2)), 2).header["causal"]
    assert header["kept"] == "largest" and 1 <= header["count"] < 32 and header["planes"] == 2
    overviews = sum(len(text) for name, text in encoded.blobs.items() if name.startswith("overview"))
    assert encoded.size() <= max(100_000, overviews + 5_000)
    page = ta.plot.html(weights).text
    contents = Contents.__new__(Contents)
    contents.header, contents.scripts = header, encoded.blobs
    for head in range(2):
        found, exact = contents.map(0, head), weights[0, head].numpy()
        assert np.all((~np.isnan(found)).sum(-1) == header["count"])
        # Kept are no smaller than those left out.
        kept = ~np.isnan(found)
        assert np.all(np.where(kept, exact, np.inf).min(-1) >= np.where(kept, -np.inf, exact).max(-1))
        assert np.nanmax(np.abs(found - exact)) <= header["error"]["largest"] * (1 + 1e-5)
    assert len(page) < 15_000_000 and Contents(page).header["kept"] == "all"


def test_long_recordings_are_read_in_pieces(monkeypatch):
    recording = recorded()
    monkeypatch.setattr("tiled_attention.plot.layers._READ_BYTES", 4 * 2 * 9 * 2)  # two rows of both heads
    layers = layers_of(recording)
    assert layers[0].pieces() == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]
    encoded = encode._encode_largest(layers, 4)
    contents = Contents.__new__(Contents)
    contents.header, contents.scripts = encoded.header | {"seqlen_q": 9, "seqlen_kv": 9}, encoded.blobs
    exact = recording[0].weights()[0, 0].numpy()
    found = contents.map(0, 0)
    assert np.nanmax(np.abs(found - exact)) < 4e-3 and (~np.isnan(found)).sum() == 36


@pytest.mark.parametrize("token", ["</script><script>alert(1)</script>", "<!--", "a\u2028b", "\x00", "\ud800", '"&quot;\\', "]]>"])
def test_tokens_and_titles_stay_text(token):
    page = str(ta.plot.html(torch.eye(2), [token, "b"], title=f"{token}</title><b>", layer_names=[token]))
    page.encode("utf-8", "surrogatepass")
    contents = Contents(page)
    assert contents.header["tokens"] == [token, "b"] and contents.header["layers"][0]["name"] == token
    assert [tag for tag, _ in contents.tags].count("script") == 4  # the data, an overview, a map, the program
    assert not any(tag == "b" and contents.tags.index((tag, attrs)) < 5 for tag, attrs in contents.tags)


def test_page_is_one_file_that_forbids_itself_the_network(tmp_path):
    page = ta.plot.html(torch.eye(3), ["a", "ü", "語"])
    path = page.save(tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == str(page) == page.text
    contents = Contents(str(page))
    policy = next(attrs["content"] for tag, attrs in contents.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;") and "script-src 'sha256-" in policy
    assert not [attrs for _, attrs in contents.tags if attrs.get("src") or attrs.get("href", "data:,") != "data:,"]
    assert not re.search(r"https?://|\bimport\s*\(|\bfetch\(|XMLHttpRequest", str(page))


def test_notebooks_get_a_frame():
    page = ta.plot.html(torch.eye(2), ['"quoted"', "'"])
    frame = Contents.__new__(Contents)
    HTMLParser.__init__(frame)
    frame.scripts, frame.tags, frame.title, frame._open = {}, [], "", None
    frame.feed(page._repr_html_())
    ((tag, attrs),) = frame.tags
    assert tag == "iframe" and attrs["srcdoc"] == str(page) and attrs["sandbox"] == "allow-scripts" and "height" in attrs["style"]
    assert "bytes" in repr(page) and len(repr(page)) < 300


def test_package_data_lists_every_file_of_the_page():
    folder = ROOT / "python/tiled_attention/plot/page"
    wanted = {path.suffix for path in folder.iterdir()}
    if sys.version_info >= (3, 11):
        import tomllib

        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
        assert {f"*{suffix}" for suffix in wanted} == {Path(pattern).name for pattern in settings["tiled_attention.plot"]}
    assert all(suffix[1:] in (ROOT / "MANIFEST.in").read_text() for suffix in wanted)


# Errors.

SQUARE = torch.full((3, 3), 1 / 3)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: ta.plot.heatmap(torch.ones(3)), ValueError, "weights must be (seqlen_q, seqlen_kv)"),
        (lambda: ta.plot.heatmap("abc"), TypeError, "weights must be a tensor, a sequence of tensors or a recording, got str"),
        (lambda: ta.plot.html([]), ValueError, "weights must hold at least one layer, got none"),
        (lambda: ta.plot.html(torch.eye(3).long()), TypeError, "weights must be floating point, got torch.int64"),
        (lambda: ta.plot.html(-SQUARE), ValueError, "weights must be finite and at least 0"),
        (lambda: ta.plot.html(SQUARE * float("nan")), ValueError, "weights must be finite and at least 0"),
        (lambda: ta.plot.html(torch.ones(0, 3)), ValueError, "weights must have a head, a query and a key at least, got (1, 0, 3)"),
        (lambda: ta.plot.html([SQUARE]), ValueError, "weights must hold tensors ([batch,] num_heads, seqlen_q, seqlen_kv)"),
        (
            lambda: ta.plot.html([SQUARE[None], SQUARE[None, :2]]),
            ValueError,
            "weights must have the same lengths in every layer",
        ),
        (lambda: ta.plot.heatmap(SQUARE, tokens=["a"]), ValueError, "tokens must have 3 entries, one a query, got 1"),
        (lambda: ta.plot.html(SQUARE, key_tokens=["a"]), ValueError, "key_tokens must have 3 entries, one a key, got 1"),
        (lambda: ta.plot.html(SQUARE, "abc"), TypeError, "tokens must be a sequence of strings, one a token, got one string"),
        (lambda: ta.plot.html(SQUARE, layer_names=["a", "b"]), ValueError, "layer_names must have 1 entries, one a layer, got 2"),
        (lambda: ta.plot.heatmap(SQUARE, heads=1), IndexError, "heads must be among [0], got 1"),
        (lambda: ta.plot.heatmap(SQUARE, layers=[]), ValueError, "layers must name at least one, got none"),
        (lambda: ta.plot.heatmap(SQUARE, tile=0), ValueError, "tile must be an integer >= 1 or two of them, got 0"),
        (lambda: ta.plot.heatmap(SQUARE, mask="causal"), TypeError, "mask must be a mask or a bool tensor, got str"),
        (lambda: ta.plot.heatmap(SQUARE, mask=torch.ones(2, 3).bool()), ValueError, "mask must be bool (..., 3, 3), got torch.bool (2, 3)"),
        (lambda: ta.plot.heatmap(SQUARE, mask=torch.ones(2, 3, 3).bool()), ValueError, "mask must be for 1 or 1 heads, got 2"),
        (lambda: ta.plot.heatmap(SQUARE.expand(2, 3, 3), axes=pyplot.subplots()[1]), ValueError, "axes must be 1 x 2"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)


def test_recorded_rows_are_refused():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    with torch.no_grad(), ta.record_attention(layer, rows=[0]) as recording:
        layer(x, x, x, need_weights=False)
    with pytest.raises(ValueError, match=r"was recorded with rows=, which keeps those rows only: record it without rows="):
        ta.plot.html(recording)


def test_without_matplotlib_a_page_is_made_and_a_heatmap_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ta.plot.html(SQUARE)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        ta.plot.heatmap(SQUARE)


# Command.


def test_command_writes_a_page_of_a_model_of_the_comparison(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["heatmap", "--text", "The unbelievable cat", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "6 layers, 72 heads" in said and str(page) in said and "within 0.3" in said
    contents = Contents(page.read_text(encoding="utf-8"))
    tokenizer, model = sentence_model()
    ids = tokenizer("The unbelievable cat", return_tensors="pt").input_ids
    assert contents.header["tokens"] == tokenizer.convert_ids_to_tokens(ids[0]) and contents.title == "all-MiniLM-L6-v2"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(ids, output_attentions=True).attentions
    for layer in range(6):
        for head in range(12):
            assert np.abs(contents.map(layer, head) - exact[layer][0, head].numpy()).max() < 5e-3
    assert main(["heatmap", "--text", "word " * 600, "--out", str(page)]) == 2
    assert "the text has 602 tokens, all-MiniLM-L6-v2 takes 512: --max-tokens 512 uses the first ones" in capsys.readouterr().err


def test_command_reads_a_folder_and_a_file_and_draws_a_picture(tmp_path):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    tokenizer = sentence_model()[0]
    tokenizer.save_pretrained(tmp_path / "model")
    transformers.BertModel(transformers.BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("one two three four five six")
    arguments = ["--model", str(tmp_path / "model"), "--file", str(tmp_path / "text.txt"), "--max-tokens", "6", "--title", "small"]
    assert main(["heatmap", *arguments, "--out", str(tmp_path / "page.html"), "--png", str(tmp_path / "heads.png")]) == 0
    contents = Contents((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert contents.header["tokens"] == ["[CLS]", "one", "two", "three", "four", "[SEP]"] and contents.title == "small"
    assert [layer["heads"] for layer in contents.header["layers"]] == [[0, 1], [0, 1]]
    assert pyplot.imread(tmp_path / "heads.png").shape[2] == 4


def test_labels_of_bytes_that_are_no_text():
    class Tokenizer:
        """Pieces of UTF-8, as byte-level tokenizers have them."""

        pieces: ClassVar = {1: b" cat", 2: b"\xc3", 3: b"\xa9"}

        def decode(self, ids):
            return b"".join(self.pieces[index] for index in ids).decode(errors="replace")

        def convert_ids_to_tokens(self, ids):
            return [f"<{index}>" for index in ids]

    assert token_labels(Tokenizer(), [1, 2, 3]) == [" cat", "<2>", "<3>"]


NOTHING = "nothing to write: give --out PAGE.html, --png PICTURE.png or both"
UNKNOWN = "--model must be all-MiniLM-L6-v2, SmolLM2-135M or a folder, got 'gpt-9'"


@pytest.mark.parametrize(
    "options, words",
    [
        (["--text", "a"], NOTHING),
        (["--text", "a", "--out", "no/such/folder/page.html"], "no/such/folder is not a folder"),
        (["--text", "a", "--out", "page.html", "--model", "gpt-9"], UNKNOWN),
    ],
)
def test_command_says_what_is_wrong(options, words, capsys):
    assert main(["heatmap", *options]) == 2
    assert words in capsys.readouterr().err

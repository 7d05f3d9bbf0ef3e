"""Caches of torch.compile: compiled code is used again by the same version of the library, in every thread, and by no other version."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import tiled_attention as ta
from tiled_attention import compile_cache, compiled


@pytest.fixture(autouse=True)
def _fresh():
    tag = torch.compiler.config.cache_key_tag
    torch._dynamo.reset()
    with fresh_cache():
        yield
    torch._dynamo.reset()
    torch.compiler.config.cache_key_tag = tag


def step() -> tuple[str, Tensor]:
    """Compiles a call and its derivative, as a new process would. How the cache took it, and the gradient."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    torch.compile(lambda *tensors: ta.attention(*tensors, mask=ta.Causal()))(query, key, value).sum().backward()
    (how,) = [name for name in ("miss", "hit") if counters["aot_autograd"][f"autograd_cache_{name}"]]
    assert query.grad is not None
    return how, query.grad


def install_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version would bring: its own key, and another derivative."""
    backward = compiled._Attention.backward

    def doubled(ctx, *grads):
        keyset, query, *others = backward(ctx, *grads)
        return (keyset, 2 * query, *others)

    monkeypatch.setattr(compiled._Attention, "backward", staticmethod(doubled))
    monkeypatch.setattr(compile_cache, "key", lambda: "tiled-attention-9.9.9-0")
    torch.compiler.config.cache_key_tag = ""


def test_same_version_compiles_once():
    (first, expected), (second, got) = step(), step()
    assert (first, second) == ("miss", "hit")
    assert torch.equal(got, expected)


def test_another_version_compiles_its_own(monkeypatch: pytest.MonkeyPatch):
    _, expected = step()
    install_another_version(monkeypatch)
    how, got = step()
    assert how == "miss"
    assert torch.equal(got, 2 * expected)


def test_threads_share_one_key():
    # torch's compiler has its settings per thread: what the import set is not seen in another one.
    _, expected = step()
    seen = []

    def work() -> None:
        seen.append((*step(), torch.compiler.config.cache_key_tag))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((how, got, tag),) = seen
    assert how == "hit"
    assert torch.equal(got, expected)
    assert tag == compile_cache.key()


def test_a_tag_of_the_user_stays():
    torch.compiler.config.cache_key_tag = "mine"
    compile_cache.key_caches()
    compile_cache.key_caches()
    assert torch.compiler.config.cache_key_tag == f"mine+{compile_cache.key()}"


def test_key_is_of_the_version_and_the_modules(tmp_path: Path):
    package = Path(ta.__file__).parent
    for copy in ("a", "b"):
        shutil.copytree(package, tmp_path / copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    key = compile_cache.key_of(package, "1.0")
    assert key.startswith("tiled-attention-1.0-")
    assert compile_cache.key_of(tmp_path / "a", "1.0") == key
    assert compile_cache.key_of(tmp_path / "a", "1.1") != key
    with (tmp_path / "a/fake.py").open("a") as module:
        module.write("\n")
    (tmp_path / "b/fake.py").rename(tmp_path / "b/fakes.py")
    assert len({key, compile_cache.key_of(tmp_path / "a", "1.0"), compile_cache.key_of(tmp_path / "b", "1.0")}) == 3

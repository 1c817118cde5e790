"""The hardware catalogue against figures typed here from the vendors' datasheets, and what a file may not say."""

import pytest

from paged_jax.simulation.hardware import Hardware, hardware_names, load_hardware

# cores, memory in GB as sold, TB/s, dense bfloat16 TFLOP/s, GB/s one way to the neighbours
DATASHEETS = {
    "a100-40gb": (108, 40, 1.555, 312, 300),
    "a100-80gb": (108, 80, 2.039, 312, 300),
    "h100": (132, 80, 3.35, 989.4, 450),
    "h200": (132, 141, 4.8, 989.4, 450),
    "l4": (58, 24, 0.300, 121, 32),
    "tpu-v4": (2, 32, 1.228, 275, 300),
    "tpu-v5e": (1, 16, 0.819, 197, 200),
    "tpu-v5p": (2, 95, 2.765, 459, 600),
    "tpu-v6e": (1, 32, 1.640, 918, 400),
    "tpu7x": (2, 192, 7.37, 2307, 600),
}


def test_the_catalogue_holds_these_devices():
    assert set(hardware_names()) == {*DATASHEETS, "this-cpu"}


@pytest.mark.parametrize("name", DATASHEETS)
def test_datasheet_figures(name):
    device = load_hardware(name)
    cores, gigabytes, bandwidth, peak, link = DATASHEETS[name]
    assert device.num_cores == cores
    assert device.memory_bytes / 1e9 == pytest.approx(gigabytes, rel=0.08)  # GB or GiB, and what the driver keeps
    assert device.memory_bandwidth / 1e12 == pytest.approx(bandwidth, rel=0.03)
    assert device.peak_flops["bfloat16"] / 1e12 == pytest.approx(peak, rel=0.01)
    assert device.peak_flops["float16"] == device.peak_flops["bfloat16"]
    assert device.link_bandwidth / 1e9 == pytest.approx(link, rel=0.25)
    assert device.kind == ("tpu" if name.startswith("tpu") else "gpu")


@pytest.mark.parametrize("name", ["a100-40gb", "a100-80gb", "h100", "h200", "l4", "tpu-v4", "tpu-v6e", "tpu7x"])
def test_eight_bit_peaks_are_twice_those_of_sixteen_bits_where_there_are_any(name):
    device = load_hardware(name)
    eight = max(device.peak_flops.get("int8", 0), device.peak_flops.get("float8", 0))
    expected = 1 if name == "tpu-v4" else 2
    assert eight / device.peak_flops["bfloat16"] == pytest.approx(expected, rel=0.01)


def test_sizes_that_bound_kernels():
    # shared memory of a thread block by compute capability 8.0, 9.0, 8.9; VMEM by chip; 1 MiB of SMEM
    kib = {"a100-40gb": 163, "a100-80gb": 163, "h100": 227, "h200": 227, "l4": 99}
    mib = {"tpu-v4": 16, "tpu-v5e": 128, "tpu-v5p": 64, "tpu-v6e": 128, "tpu7x": 64}
    for name, size in kib.items():
        device = load_hardware(name)
        assert (device.fast_memory_bytes, device.scalar_memory_bytes) == (size * 1024, None)
    for name, size in mib.items():
        device = load_hardware(name)
        assert (device.fast_memory_bytes, device.scalar_memory_bytes) == (size * 2**20, 2**20)


def test_devices_that_links_join():
    # 8 GPUs of an HGX board or a PCIe server; chips of a pod by the Cloud TPU documentation
    pods = {"tpu-v4": 4096, "tpu-v5e": 256, "tpu-v5p": 8960, "tpu-v6e": 256, "tpu7x": 9216, "this-cpu": None}
    assert {n: load_hardware(n).link_devices for n in hardware_names()} == {n: pods.get(n, 8) for n in hardware_names()}


@pytest.mark.parametrize("name", [*DATASHEETS, "this-cpu"])
def test_fixed_times_are_of_the_right_order(name):
    device = load_hardware(name)
    micro = {
        "kernel_s": (0, 50),
        "kernel_launch_s": (1, 100),
        "step_launch_s": (1, 50_000),
        "host_step_s": (1, 10_000),
        "host_request_s": (0.1, 1000),
        "eager_host_step_s": (1, 10_000),
        "eager_host_request_s": (0.1, 1000),
        "host_link_latency_s": (0, 100),
        "attention_decode_s": (0, 1000),
        "attention_chunk_s": (0, 1000),
    }
    for field, (low, high) in micro.items():
        assert low <= getattr(device, field) * 1e6 <= high, field


def test_names_and_files_that_do_not_exist(tmp_path):
    with pytest.raises(ValueError, match="no hardware 'h20' in the catalogue; did you mean 'h200'"):
        load_hardware("h20")
    with pytest.raises(ValueError, match=r"no hardware file '.*mine.yaml': `paged-jax calibrate` writes one"):
        load_hardware(str(tmp_path / "mine.yaml"))


def written(tmp_path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def catalogue_text(name: str) -> str:
    from importlib import resources

    return resources.files("paged_jax.catalog").joinpath("hardware", f"{name}.yaml").read_text()


def test_a_file_of_ones_own(tmp_path):
    path = written(tmp_path, catalogue_text("l4").replace("name: l4", "name: mine"))
    assert load_hardware(path) == load_hardware("l4").model_copy(update={"name": "mine"})
    assert isinstance(load_hardware(path), Hardware)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("num_cores: 58", "num_core: 58", "unknown key 'num_core'; did you mean 'num_cores'"),
        ("memory_bandwidth: 3.0e11", "memory_bandwidth: -1", "memory_bandwidth"),
        ("overlap: ", "overlap: 0.5 # ", "overlap"),
        ("attention_masked_share: 1.0", "attention_masked_share: 1.1", "attention_masked_share"),
        ("link_devices: 8", "link_devices: 1", "link_devices"),
        ("kind: gpu", "kind: npu", "kind"),
        ("kernel_s: ", "# ", "kernel_s is missing"),
        ("efficiency: 0.744", "efficiency: 1.1", "gemm_tiles.0: input should be less than or equal to 1"),
    ],
)
def test_files_that_are_refused(tmp_path, old, new, problem):
    text = catalogue_text("l4")
    assert old in text
    with pytest.raises(ValueError, match=problem) as caught:
        load_hardware(written(tmp_path, text.replace(old, new)))
    assert "mine.yaml" in str(caught.value)


def test_a_file_that_is_no_mapping(tmp_path):
    with pytest.raises(ValueError, match="is not a mapping"):
        load_hardware(written(tmp_path, "- 1"))
    with pytest.raises(ValueError, match="not valid YAML"):
        load_hardware(written(tmp_path, "a: ["))

"""The platform that traced code will run on."""

import re
from typing import NamedTuple

import jax


class Platform(NamedTuple):
    """A name ("cpu", "gpu" or "tpu"), and the compute capability of a GPU where it is known."""

    name: str
    compute_capability: float | None = None


def target_platform() -> Platform:
    """The platform that is being compiled for: that of an abstract mesh in use, else the default device's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        # JAX 0.11 and 0.12 differ in what an abstract device knows beside its kind
        name = getattr(device, "platform", None) or ("tpu" if "TPU" in device.device_kind else "gpu")
        return Platform("gpu" if name == "cuda" else name)
    name = jax.default_backend()
    if name != "gpu":
        return Platform(name)
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    # AMD's are names, such as gfx942: no kernel here is for those
    return Platform(name, float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0)

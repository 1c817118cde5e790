"""Writes a device as the YAML that `load_hardware` reads."""

from paged_jax.simulation.hardware import Hardware


def hardware_text(hardware: Hardware, comments: tuple[str, ...] = ()) -> str:
    """One line for each field that is set, after the comments."""
    lines = [f"# {comment}" for comment in comments]
    for name, value in hardware.model_dump(exclude_none=True).items():
        lines.append(f"{name}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    """The value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(v)}" for key, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        text = f"{value:.6g}"
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return str(value)

"""From what a person types after `model:` to a shape."""

from paged_jax.catalog.entries import entries
from paged_jax.simulation.model_shape import ModelShape


def find_shape(model: str) -> ModelShape:
    """The shape of a catalogue name, a Hugging Face directory, a `.gguf` file or a hub id `org/name`.

    No weights are read. Raises FileNotFoundError or ValueError with one sentence, as `checkpoints.resolve` does.
    """
    for entry in entries():
        if entry.name == model:
            return entry.shape
    # imported here: a catalogue name needs none of the readers of checkpoints
    from paged_jax.checkpoints.resolve import resolve

    return ModelShape.from_config(resolve(model, load_format="dummy").config)

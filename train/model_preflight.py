"""The model's directories, looked at before any worker starts: configurations and the headers of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samples.errors import InputError
from train.config.run import RunConfig


def check_trained_model(config: RunConfig) -> None:
    """Refuse a model that the trainer cannot build or fill, and a layout that does not divide it.

    Raises InputError naming ``--hf-checkpoint`` or ``--ref-load``. No weight is read, which takes milliseconds.
    """
    from train.megatron.layout import check_layout
    from train.megatron.model import load_hf_config
    from train.megatron.models import family_of
    from train.megatron.recomputation import check_recompute
    from train.megatron.weights.loading import check_weights

    directory, trusted = config.model.hf_checkpoint, config.model.trust_remote_code
    assert directory is not None
    hf_config = load_hf_config(directory, trusted)
    family = family_of(hf_config)
    check_layout(hf_config, config.parallel)
    check_recompute(hf_config, config.recompute, config.parallel.pipeline_model_parallel_size)
    check_weights(family, hf_config, directory)
    reference = config.model.ref_load
    if reference is not None and config.algorithm.kl_loss_coef > 0:
        theirs = load_hf_config(reference, trusted, "--ref-load")
        family_of(theirs, "--ref-load")
        _check_same_architecture(theirs, hf_config, family.fields.used | {"model_type", "rope_parameters"}, reference)
        check_weights(family, hf_config, reference, "--ref-load")


def check_served_model(config: RunConfig, engine: str, model_dir: Path) -> None:
    """Refuse a model that the engine cannot open, and stop tokens that it does not have."""
    from rollout.engines.torch_engine.opening import check_model_directory, open_config

    if engine == "torch":
        check_model_directory(model_dir, config.model.trust_remote_code)
    stops = config.rollout.rollout_stop_token_ids
    if stops:
        size = open_config(model_dir, config.model.trust_remote_code).get_text_config().vocab_size
        beyond = [token for token in stops if token >= size]
        if beyond:
            raise InputError(
                f"--rollout-stop-token-ids {beyond[0]}: the model's vocabulary ends at {size - 1} (vocab_size={size}), "
                "so it is never generated; leave it out, or look the id up in the model's tokenizer"
            )


def _check_same_architecture(theirs: Any, ours: Any, fields: frozenset[str], reference: str) -> None:
    # The reference is built by --hf-checkpoint's config, so equal shapes are not enough.
    for name in sorted(fields):
        there, here = (config.to_dict().get(name) for config in (theirs, ours))
        if there != here:
            raise InputError(
                f"--ref-load {reference}: {name} is {there!r} in its config.json and {here!r} in --hf-checkpoint's; "
                "the reference has to be of the same architecture"
            )

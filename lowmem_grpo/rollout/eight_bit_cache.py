"""A key-value cache in 8 bits: how far its samples may be from the trainer, and what corrects them."""

from lowmem_grpo.losses.off_policy import MismatchWatch

# Of the mean difference of log-probabilities, where the cache is in 8 bits. An e4m3 number has 3 bits of mantissa, an
# e5m2 number 2, so it rounds twice as coarsely. Measured on the model that ships with the package: 0.09 and 0.2
BOUNDS = {"fp8": 0.2, "fp8_e4m3": 0.2, "fp8_e5m2": 0.4}
MASKED = 'vllm_importance_sampling_mode="token_mask" with vllm_importance_sampling_clip_min=0.5 and _clip_max=5'


def advice(cache_dtype: str, metrics: dict[str, float], correction: bool | None, watch: MismatchWatch) -> str:
    """Return a line on what the parity gate measured with this cache, and the corrections that exist. `correction` is
    the setting `vllm_importance_sampling_correction`, which is left as it is."""
    k3 = metrics["sampling/parity/k3"]
    mean, most = metrics["sampling/parity/mean"], metrics["sampling/parity/max"]
    return (f"the key-value cache is in 8 bits ({cache_dtype}): the sampler's log-probabilities are off from "
            f"the trainer's by {mean:.4f} on average, at most by {most:.3f} (mean k3 {k3:.2g}). "
            f"{now(k3, correction, watch.bound)}. If few tokens differ a lot, {MASKED} leaves these out; "
            'kv_cache_dtype="auto" ends the difference')


def now(k3: float, correction: bool | None, bound: float) -> str:
    """Return what the run does about it as it is set, and what it could do."""
    if correction:
        return "Tokens are weighed for it (vllm_importance_sampling_correction=True)"
    if correction is False:
        return ("Nothing corrects it (vllm_importance_sampling_correction=False); None weighs tokens while the mean k3 "
                f"is above {bound:g}, True always")
    if k3 > bound:
        return (f"Tokens are weighed for it, as the mean k3 is above {bound:g} (vllm_importance_sampling_correction is "
                "None); True weighs them always")
    return (f"Nothing corrects it yet, as the mean k3 is at most {bound:g} (vllm_importance_sampling_correction is "
            "None); True weighs tokens always")

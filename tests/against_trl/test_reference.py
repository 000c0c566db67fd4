"""The reference of a run that goes on from an adapter, against real TRL 1.16: its copy of that adapter."""

import pytest
from parity_runs import difference, gradients, our_learner, our_step
from small_models import load_model, with_adapter
from trl_runs import make_trainer, move, prepare, random_rollouts, window

pytestmark = pytest.mark.filterwarnings("ignore:.*rollout_func.*")


@pytest.mark.parametrize("drift", [0.0, 0.02], ids=["the first step", "a later step"])
def test_kl_loss_and_gradients_of_a_run_from_an_adapter_are_those_of_trl(drift: float) -> None:
    rollouts, settings = random_rollouts(), {"beta": 0.05, "loss_type": "dapo", "use_bias_correction_kl": True}
    learner = our_learner(with_adapter(load_model("Llama")), **settings)
    policy = learner.policy
    policy.keep_reference()
    try:
        trainer = make_trainer(rollouts, with_adapter(load_model("Llama")), adapter=False, settings=settings)
        assert "ref" in trainer.model.peft_config
        move(trainer, drift)
        policy.model.load_state_dict({name: tensor for name, tensor in trainer.model.state_dict().items()
                                      if ".ref." not in name})
        run, ours = window(trainer, prepare(trainer, rollouts)), our_step(learner, rollouts)
    finally:
        policy.reference_adapter = None  # the model is shared with other tests
    assert ours.metrics["kl"] == pytest.approx(run.metrics["kl"], rel=1e-3, abs=1e-7)
    assert (ours.metrics["kl"] > 1e-3) == bool(drift) and (drift or abs(ours.metrics["kl"]) < 1e-7)
    assert ours.loss == pytest.approx(run.loss.item(), rel=1e-5, abs=1e-6)
    assert difference(ours.gradients, gradients(trainer.model)) < 1e-4

"""ART's names that this package lacks, and what to use in their place."""

from collections.abc import Iterable

from lowmem_grpo.utils import refuse_name

LOCAL = "Training runs in this process, on this machine: use LocalBackend()."
REFUSED = {name: advice for names, advice in {  # names of ART's package, `dev`, backends and models
    "ServerlessBackend ServerlessTrainResult SkyPilotBackend TinkerBackend TinkerNativeBackend MegatronBackend "
    "serverless skypilot tinker tinker_native megatron TinkerArgs TinkerNativeArgs TinkerTrainingClientArgs "
    "initialize_cluster down MegatronConfig MegatronTrainConfig MegatronRuntimeConfig MegatronTopologyConfig "
    "get_megatron_runtime_config init_megatron_runtime_config": LOCAL,
    "trajectory trajectory_group current_trajectory no_capture":
        "Nothing is captured from calls in secret: make Trajectory(messages_and_choices=[...], reward=...) of what "
        "you said and heard, and TrajectoryGroup([...]) of several (docs/agents.md).",
    "tokenize tensorize get_tokenizer": "Trajectories are made into tensors while model.train(groups) runs; the "
                                        "tokenizer is transformers' AutoTokenizer.from_pretrained(model.base_model).",
    "LocalServingUnavailableError": "model.serve() opens the address of the trainer's own engine, and says what is in "
                                    "the way.",
    "MetricDefinition PIPELINE_RL_DASHBOARD_DEFAULT_METRICS PIPELINE_RL_METRIC_DEFINITIONS "
    "PIPELINE_RL_SCORE_METRICS":
        "The metrics of a run are in its metrics.jsonl, and docs/checks.md says what each means.",
    "PipelineTrainer pipeline_trainer trajectory_group_batches PipelineAutotuneConfig PipelineRuntimeConfig":
        "Write the loop: `groups = await gather_trajectory_groups(...)`, then `await model.train(groups)`. One GPU "
        "samples or trains, so nothing is gained by doing both at a time.",
    "TrainSFTConfig train_sft": "Train on given answers with SFTTrainer(model, args=SFTConfig(...), "
                                "train_dataset=rows): docs/sft.md.",
    "utils":
        "There is no module of that name: retry and limit_concurrency are names of lowmem_grpo.agents itself, "
        "format_message is in lowmem_grpo.agents.types. For iterate_dataset, shuffle the rows with a seeded "
        "random.Random and slice them.",
    "mcp": "Tools of an MCP server come from lowmem_grpo.environments.mcp_tools; write the scenarios yourself.",
    "langgraph": "LangGraph needs no wrapper: give its ChatOpenAI the base_url and api_key of model.serve().",
    "wrap_rollout": "Nothing has to be wrapped: give your framework the base_url of a session of model.serve().",
    "init_chat_model": "Use langchain's own ChatOpenAI with the base_url and api_key of model.serve().",
    "get_openai_server_config is_dedicated_mode validate_dedicated_config":
        "There is no server of its own beside the trainer: model.serve() opens an address of the trainer's own "
        "engine.",
    "_experimental_pull_from_s3 _experimental_push_to_s3 _experimental_pull_model_checkpoint "
    "_experimental_fork_checkpoint":
        "A run's folder holds all of it (path/project/name, with checkpoint-N): copy that folder with any tool, and "
        "the next register() goes on from its last checkpoint.",
    "_experimental_deploy": "Export the adapter or the merged model, `lowmem-grpo export path/project/name`, and "
                            "serve what it wrote with any server.",
    "update_wandb_config metrics_builder activate_metrics_context":
        "Every number goes into the run's metrics.jsonl; give LocalBackend(report_to='wandb') to send them on.",
    "cost_calculator set_cost_calculator": "Sampling on one's own machine has no price; what a judge costs is in "
                                           "judge.summary().",
}.items() for name in names.split()}


def missing(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the AttributeError for a name that `owner` lacks; for ART's names raise UnsupportedError, with advice."""
    refuse_name(name, owner, REFUSED)
    return AttributeError(f"{owner} has no attribute {name!r}; it has {', '.join(known)}")

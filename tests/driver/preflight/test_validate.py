"""Configurations refused before Ray starts, with their error messages."""

from __future__ import annotations

import os
import subprocess

import pytest
from support.configs import RECIPES, compose, good_overrides, sentences, write_rows
from support.forks import ROOT, RUN_MODULE, with_verl

from recipe.grpo.policy import Uniform
from verl_ext.driver.preflight.validate import BadConfig, validate
from verl_ext.policy import RolloutPolicy, StepCost

REWARD_MODEL = ["reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true"]


class Smaller(Uniform):
    """Groups of n - 1 rollouts."""

    def step_cost(self):
        return StepCost.of_rounds(self.train_batch_size, self.n - 1)


# recipe, overrides, and required parts of the error message: the key with its value, and the remedy.
REFUSED = [
    ("grpo", ["trainer.use_v1=false"], "trainer.use_v1=False", "use true"),
    ("grpo", ["trainer.v1.trainer_mode=separate_async"], "trainer.v1.trainer_mode=separate_async", "sync"),
    ("grpo", ["trainer.total_training_steps=0"], "trainer.total_training_steps=0", "at least 1"),
    ("grpo", ["trainer.total_epochs=0"], "trainer.total_epochs=0", "at least 1"),
    ("grpo", ["trainer.nnodes=0"], "trainer.nnodes=0", "at least 1"),
    ("grpo", ["trainer.n_gpus_per_node=-1"], "trainer.n_gpus_per_node=-1", "at least 1"),
    ("grpo", ["trainer.critic_warmup=5"], "trainer.critic_warmup=5", "use 0"),
    ("grpo", ["trainer.device=cuda"], "trainer.device=cuda", "hardware="),
    ("grpo", ["actor_rollout_ref.hybrid_engine=false"], "actor_rollout_ref.hybrid_engine=False", "use true"),
    ("grpo", ["data.train_batch_size=0"], "data.train_batch_size=0", "at least 1"),
    ("grpo", ["actor_rollout_ref.actor.ppo_mini_batch_size=3"], "ppo_mini_batch_size=3", "divide"),
    ("grpo", ["actor_rollout_ref.actor.ppo_mini_batch_size=16"], "ppo_mini_batch_size=16", "divide"),
    ("grpo", ["actor_rollout_ref.actor.use_dynamic_bsz=false"], "use_dynamic_bsz=False", "use true"),
    ("grpo", ["actor_rollout_ref.actor.loss_agg_mode=mean"], "loss_agg_mode=mean", "token-mean"),
    (
        "grpo",
        ["actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.loss_agg_mode=token-mean"],
        "actor.shuffle=True",
        "false",
    ),
    (
        "grpo",
        ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=10", "actor_rollout_ref.actor.use_kl_loss=true"],
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=10",
        "use 1024 or more",
    ),
    (
        "grpo",
        ["actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "actor_rollout_ref.actor.loss_agg_mode=token-mean"],
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        "seq-mean-token-mean, use that",
    ),
    (
        "grpo",
        ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
        "actor_rollout_ref.actor.loss_scale_factor=null",
        "verl would divide the loss of each micro-batch by its own longest response, use data.max_response_length=",
    ),
    (
        "grpo",
        ["algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=token"],
        "algorithm.rollout_correction.bypass_mode=True",
        "use false",
    ),
    (
        "grpo",
        ["actor_rollout_ref.model.use_remove_padding=true", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "attn_implementation=sdpa each device would attend to its own part of a sequence alone, use 1",
    ),
    (
        "hora",
        ["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"],
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
        "use 1",
    ),
    (
        "grpo",
        ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=null"],
        "algorithm.rollout_correction.rollout_is_threshold=null",
        "use a number above 0, or two as in 0.5_5.0; with null verl would leave out rollout_is",
    ),
    (
        "grpo",
        ["algorithm.rollout_correction.rollout_rs=token_k1"],
        "algorithm.rollout_correction.rollout_rs_threshold=null",
        "rollout_rs=token_k1 needs one threshold",
    ),
    (
        "grpo",
        ["algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=0"],
        "algorithm.rollout_correction.rollout_rs_threshold=0",
        "for k1 a number of at least 1 or two as in 0.5_5.0",
    ),
    (
        "grpo",
        [
            "algorithm.rollout_correction.rollout_rs='seq_mean_k1,token_k2'",
            "algorithm.rollout_correction.rollout_rs_threshold='2,3,4'",
        ],
        "algorithm.rollout_correction.rollout_rs_threshold=2,3,4",
        "rollout_rs=seq_mean_k1,token_k2 needs one threshold, or 2 with commas between them: a number above 0",
    ),
    ("grpo", ["data.gen_batch_size=4"], "data.gen_batch_size=4", "use null"),
    ("grpo", ["algorithm.adv_estimator=gae"], "algorithm.adv_estimator=gae", "grpo"),
    ("grpo", ["algorithm.adv_estimator=remax"], "algorithm.adv_estimator=remax", "rloo"),
    ("grpo", ["critic.enable=true"], "critic.enable=True", "false"),
    (
        "pilot_commit",
        ["algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.calculate_log_probs=false"],
        "calculate_log_probs=False",
        "use true",
    ),
    (
        "dynamic_sampling",
        ["algorithm.filter_groups.enable=true"],
        "algorithm.filter_groups.enable=True",
        "use false",
    ),
    ("grpo", ["skip.rollout_tq.enable=true"], "skip.rollout_tq.enable=True", "use false"),
    ("grpo", ["trainer.v1.sampler.sync_refill_failed_groups=true"], "sync_refill_failed_groups=True", "use false"),
    ("grpo", ["trainer.v1.sampler.custom_sampler.path=x.py"], "custom_sampler.path=x.py", "use null"),
    ("grpo", ["actor_rollout_ref.rollout.full_determinism=true"], "full_determinism=True", "use false"),
    (
        "grpo",
        ["+actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B"],
        "agent_loop_manager_class=a.B",
        "use null",
    ),
    ("grpo", ["reward.reward_model.enable=true"], "reward.reward_model.enable_resource_pool=False", "use true"),
    ("grpo", ["reward.reward_model.enable_resource_pool=true"], "enable_resource_pool=True", "enable=False; use false"),
    ("grpo", REWARD_MODEL, "reward.reward_model.nnodes=0", "at least 1"),
    ("grpo", [*REWARD_MODEL, "reward.reward_model.n_gpus_per_node=0"], "model.n_gpus_per_node=0", "at least 1"),
    ("grpo", REWARD_MODEL, "reward.reward_model.rollout.name=null", "use vllm or sglang"),
    (
        "grpo",
        [*REWARD_MODEL, "reward.reward_model.rollout.name=vlm"],
        "reward.reward_model.rollout.name=vlm",
        "use vllm or sglang",
    ),
    (
        "grpo",
        [*REWARD_MODEL, "reward.reward_model.rollout.name=trtllm"],
        "reward.reward_model.rollout.name=trtllm",
        "use vllm or sglang",
    ),
    (
        "grpo",
        [*REWARD_MODEL, "reward.reward_model.rollout.data_parallel_size=0"],
        "reward.reward_model.rollout.data_parallel_size=0",
        "at least 1",
    ),
    (
        "grpo",
        [*REWARD_MODEL, "reward.reward_model.nnodes=1", "reward.reward_model.n_gpus_per_node=1"],
        "reward.reward_model.rollout.tensor_model_parallel_size=2",
        "it must divide the 1 devices of reward.reward_model.nnodes and reward.reward_model.n_gpus_per_node",
    ),
    ("grpo", REWARD_MODEL, "reward.reward_model.model_path=null", "an existing folder, or a model's name on the hub"),
    ("grpo", ["rollout_driver.poll_interval=0"], "rollout_driver.poll_interval=0", "positive"),
    ("grpo", ["rollout_driver.stall_timeout=-3"], "rollout_driver.stall_timeout=-3", "positive"),
    ("grpo", ["rollout_driver.rollout_budget=0"], "rollout_driver.rollout_budget=0", "at least 1"),
    ("grpo", ["trainer.resume_mode=always"], "trainer.resume_mode=always", "resume_path"),
    ("grpo", ["actor_rollout_ref.actor.optim.warmup_style=linear"], "verl refuses the configuration: ", "warmup_style"),
    ("grpo", ["trainer.resume_mode=resume_path"], "trainer.resume_from_path=null", "global_step_N"),
    ("grpo", ["actor_rollout_ref.model.path=/no/such/model"], "model.path=/no/such/model", "existing folder"),
    ("grpo", ["data.train_files=/no/such.parquet"], "data.train_files=/no/such.parquet", "no such file"),
    ("grpo", ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"], "train_files=", "40"),
    ("grpo", ["data.train_max_samples=5"], "data.train_files=", "holds 5 prompts"),
    ("grpo", ["data.prompt_key=question"], "data.train_files=", "lacks the columns ['question']"),
    ("grpo", ["reward.custom_reward_function.path=/no/reward.py"], "custom_reward_function.path=/no/reward.py", "load"),
    ("grpo", ["rollout_policy._target_=recipe.grpo.policy.Nothing"], "recipe.grpo.policy.Nothing", "Nothing"),
    ("grpo", ["rollout_policy._target_=builtins.dict"], "rollout_policy._target_=builtins.dict", "subclass"),
    ("grpo", ["rollout_policy.prompt_weight=heavy"], "rollout_policy.prompt_weight=heavy", "equal"),
    ("grpo", ["actor_rollout_ref.rollout.n=1"], "rollout_policy.n=1", "at least 2"),
    (
        "grpo",
        [f"rollout_policy._target_={__name__}.Smaller", "actor_rollout_ref.rollout.n=8"],
        "actor_rollout_ref.rollout.n=8",
        "the policy samples 7 rollouts per trained prompt; set rollout_policy.n=8, and this key to 7",
    ),
    ("dynamic_sampling", ["rollout_policy.s=0.5"], "rollout_policy.s=0.5", "at least 1"),
    ("dynamic_sampling", ["rollout_policy.max_rounds=0"], "rollout_policy.max_rounds=0", "at least 1"),
    ("hora", ["rollout_policy.G0=32"], "rollout_policy.G0=32", "less than G=32"),
    ("hora", ["rollout_policy.allocator=best"], "rollout_policy.allocator=best", "hit_utility"),
    ("hora", ["rollout_policy.estimator=oracle"], "rollout_policy.estimator=oracle", "probe"),
    ("hora", ["rollout_policy.shards=9"], "rollout_policy.shards=9", "train_batch_size"),
    ("vip", ["rollout_policy.L=9"], "rollout_policy.L=9", "n=8"),
    ("vip", ["rollout_policy.gradient=dr_grpo", "rollout_policy.L=2"], "rollout_policy.L=2", "at least 3"),
    ("vip", ["+rollout_policy.estimator_options.speed=1"], "rollout_policy.estimator_options={'speed': 1}", "gaussian"),
    ("vip", ["rollout_policy.rewards=continuous"], "rollout_policy.estimator=gaussian_process", "softplus"),
    ("knapsack", ["rollout_policy.N_up=4"], "rollout_policy.N_up=4", "n=8"),
    ("knapsack", ["+rollout_policy.allocator_options.fast=1"], "rollout_policy.allocator_options={'fast': 1}", "suit"),
    ("knapsack", ["rollout_driver.advantage_clip=0"], "rollout_driver.advantage_clip=0", "null"),
    ("grpo", ["rollout_driver.record=7"], "rollout_driver.record=7", "path of a file"),
    ("grpo", ["rollout_driver.dispatch=greedy"], "rollout_driver.dispatch=greedy", "balanced"),
    ("pilot_commit", ["rollout_policy.n_pilot=0"], "rollout_policy.n_pilot=0", "at least 1"),
    ("pilot_commit", ["rollout_policy.n_commit=0"], "rollout_policy.n_commit=0", "at least 1"),
    ("pilot_commit", ["rollout_policy.p_lower=0.9"], "rollout_policy.p_lower=0.9", "p_upper"),
    ("pilot_commit", ["rollout_policy.p_upper=1.5"], "rollout_policy.p_upper=1.5", "[0, 1]"),
    ("pilot_commit", ["rollout_policy.p_solve=0"], "rollout_policy.p_solve=0", "null"),
    ("pilot_commit", ["rollout_policy.max_delay=0"], "rollout_policy.max_delay=0", "bind=false"),
    ("pilot_commit", ["rollout_policy.order=best"], "rollout_policy.order=best", "max_variance"),
    ("pilot_commit", ["rollout_policy.n_pilot=2", "rollout_policy.p_lower=0.1", "rollout_policy.p_upper=0.4"],
     "rollout_policy.n_pilot=2", "wider bounds"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "overrides", "names", "remedy"), REFUSED)
def test_refused_in_one_sentence(recipe, overrides, names, remedy, tmp_path):
    refused = sentences(compose(recipe, *good_overrides(tmp_path), *overrides))
    assert any(names in sentence and remedy in sentence for sentence in refused), refused


@pytest.mark.parametrize("threshold", ["2.0", "'0.5_5.0'", "'3'"])
@pytest.mark.parametrize("rejection", [("null", "null"), ("token_k1", "'0.5_2.0'"), ("'token_k1,seq_max_k2'", "'2,4'")])
def test_thresholds_of_the_rollout_correction_in_verls_notations(threshold, rejection, tmp_path):
    weights = {"rollout_is": "token", "rollout_is_threshold": threshold}
    given = weights | dict(zip(("rollout_rs", "rollout_rs_threshold"), rejection, strict=True))
    overrides = [f"algorithm.rollout_correction.{key}={value}" for key, value in given.items()]
    validate(compose("grpo", *good_overrides(tmp_path), *overrides))


def test_a_reward_model_in_a_pool_of_its_own(tmp_path):
    settings = {"nnodes": 1, "n_gpus_per_node": 2, "model_path": "org/judge", "rollout.name": "vllm"}
    pool = [f"reward.reward_model.{key}={value}" for key, value in settings.items()]
    validate(compose("grpo", *good_overrides(tmp_path), *REWARD_MODEL, *pool))


def test_several_faults_are_all_named_in_the_order_of_the_checks(tmp_path):
    bad = [
        "data.train_batch_size=eight",
        "rollout_driver.poll_interval=0",
        "actor_rollout_ref.model.path=/no/model",
        "data.train_files=/no/such.parquet",
        "reward.custom_reward_function.path=/no/reward.py",
    ]
    refused = sentences(compose("grpo", *good_overrides(tmp_path), *bad))
    assert [sentence.split(" is not valid: ")[0] for sentence in refused] == bad


def test_a_missing_model_hides_no_threshold_and_one_fault_is_one_sentence(tmp_path):
    bad = ["actor_rollout_ref.model.path=/no/model", "rollout_policy.p_upper=2", "data.train_files=/no/such.parquet"]
    refused = sentences(compose("pilot_commit", *good_overrides(tmp_path), *bad, "+rollout_policy.typo=1"))
    starts = [sentence.split(" is not valid: ")[0] for sentence in refused]
    assert starts == [bad[0], "rollout_policy.typo=1", bad[1], bad[2]]
    no_rollouts = compose("grpo", *good_overrides(tmp_path), "actor_rollout_ref.rollout.n=0")
    assert sentences(no_rollouts) == ("rollout_policy.n=0 is not valid: use an integer of at least 2",)


def test_at_least_25_refusals():
    assert len(REFUSED) >= 25


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "prefix_sampling"])
def test_the_recipes_themselves_are_accepted(recipe, tmp_path):
    """With the other mode, sync: test_bad_input.py."""
    policy = validate(compose(recipe, *good_overrides(tmp_path), "trainer.v1.trainer_mode=colocate_async"))
    assert isinstance(policy, RolloutPolicy) and policy.train_batch_size == 8


def test_verl_prints_nothing_before_a_refusal(tmp_path, capfd, recwarn):
    """verl prints that its checks have passed, though a later check of ours may refuse the run."""
    validate(compose("grpo", *good_overrides(tmp_path)))
    with pytest.raises(BadConfig, match=r"it cannot be imported \(No module named 'my_package'\)$"):
        validate(compose("grpo", *good_overrides(tmp_path), "rollout_policy._target_=my_package.policies.Mine"))
    assert capfd.readouterr() == ("", "")
    assert not [str(each.message) for each in recwarn if "critic" in str(each.message)]


def test_files_that_are_no_data_are_refused(tmp_path):
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(BadConfig, match="broken.parquet is not valid: it is no parquet file"):
        validate(compose("grpo", *good_overrides(tmp_path), f"data.train_files={tmp_path}/broken.parquet"))
    write_rows(tmp_path / "bare.parquet", 40, columns=("prompt",))
    with pytest.raises(BadConfig, match=r"lacks the columns \['data_source', 'reward_model'\]"):
        validate(compose("grpo", *good_overrides(tmp_path), f"data.train_files={tmp_path}/bare.parquet"))
    write_rows(tmp_path / "none.parquet", 0)
    with pytest.raises(BadConfig, match="data.val_files=.*no rows"):
        validate(compose("grpo", *good_overrides(tmp_path), f"data.val_files={tmp_path}/none.parquet"))


@pytest.mark.ray  # its process is a fork of the stack tests' server, which has imported verl
def test_the_command_line_refuses_without_starting_ray(tmp_path):
    command = [with_verl().python, "-c", RUN_MODULE, str(ROOT), "recipe.pilot_commit"]
    command += [*good_overrides(tmp_path), "rollout_policy.p_upper=2"]
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1] == (
        "error: rollout_policy.p_upper=2 is not valid: it must be a success rate in [0, 1]"
    )
    assert "Started a local Ray instance" not in result.stderr + result.stdout
    assert not (tmp_path / "ray").exists()  # Ray makes its session's folder first of all

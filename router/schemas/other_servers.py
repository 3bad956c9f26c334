"""Fields of other servers that would change an answer.

Those that this server has under another name are taken for it. Ignoring the others would give
another answer than was asked for, without a word: each is rejected by name unless its value has no
effect. One that this server supports under its own name is declared with our fields, and not here.
The names are those of vLLM (``vllm/entrypoints``), SGLang (``srt/entrypoints``), llama.cpp
(``tools/server/server-schema.cpp``), mlx-lm and mlx-vlm, as of August 2026. Fields that do not
change the answer, such as ``id_slot`` or ``request_id``, are not listed.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from router.schemas.body import other_name, refused
from router.schemas.structured import SchemaOrText, StructuredOutputFields

_ADAPTER = "Name the adapter in 'model'."
_SCHEMA = "Use 'response_format'."
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Salt = Annotated[str, Meta(max_length=1024)]
Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_WHOLE_ANSWER = "Penalties count the whole answer."


class OtherServersFields(StructuredOutputFields, frozen=True, kw_only=True):
    """The fields that all generating endpoints reject or rename. (Those for structured output are
    inherited here because a struct cannot have two bases with fields.)"""

    # Which tokens are chosen.
    use_beam_search: Annotated[Any, refused(False)] = None
    best_of: Annotated[Any, refused(1, advice="Use 'n'.")] = None
    length_penalty: Annotated[Any, refused(1)] = None
    early_stopping: Annotated[Any, refused(False)] = None
    typical_p: Annotated[Any, refused(1)] = None
    tfs_z: Annotated[Any, refused(1)] = None
    top_n_sigma: Annotated[Any, refused(-1, 0)] = None
    p_less: Annotated[Any, refused(False)] = None
    mirostat: Annotated[Any, refused(0)] = None
    dynatemp_range: Annotated[Any, refused(0)] = None
    adaptive_target: Annotated[Any, refused(-1)] = None
    dry_multiplier: Annotated[Any, refused(0)] = None
    min_keep: Annotated[Any, refused(0)] = None
    samplers: Annotated[Any, refused(advice="The order is fixed.")] = None
    presence_context_size: Annotated[Any, refused(advice=_WHOLE_ANSWER)] = None
    frequency_context_size: Annotated[Any, refused(advice=_WHOLE_ANSWER)] = None
    repetition_detection: Annotated[Any, refused()] = None
    allowed_token_ids: Annotated[Any, refused([], advice="Use 'structured_outputs'.")] = None
    bad_words: Annotated[Any, refused([], advice="Use 'logit_bias'.")] = None
    logits_processors: Annotated[Any, refused([])] = None
    custom_logit_processor: Annotated[Any, refused("")] = None
    custom_params: Annotated[Any, refused({})] = None
    vllm_xargs: Annotated[Any, refused({})] = None
    sampling_seed: Annotated[Seed | None, other_name("seed")] = None

    # Where the answer ends, and what of it is returned.
    include_stop_str_in_output: Annotated[Any, refused(False)] = None
    no_stop_trim: Annotated[Any, refused(False)] = None
    stop_regex: Annotated[Any, refused("", [], advice="Use 'stop'.")] = None
    t_max_predict_ms: Annotated[Any, refused(-1, 0)] = None
    n_indent: Annotated[Any, refused(0)] = None
    skip_special_tokens: Annotated[Any, refused(True)] = None
    spaces_between_special_tokens: Annotated[Any, refused(True)] = None
    parse_tool_calls: Annotated[Any, refused(True)] = None
    reasoning_format: Annotated[Any, refused("auto", "deepseek")] = None
    separate_reasoning: Annotated[Any, refused(True)] = None
    stream_reasoning: Annotated[Any, refused(True)] = None
    n_probs: Annotated[Any, refused(0, advice="Use 'logprobs'.")] = None
    post_sampling_probs: Annotated[Any, refused(False)] = None
    logprob_token_ids: Annotated[Any, refused([])] = None
    return_token_ids: Annotated[Any, refused(False)] = None
    return_tokens: Annotated[Any, refused(False)] = None
    return_tokens_as_token_ids: Annotated[Any, refused(False)] = None
    return_token_offsets: Annotated[Any, refused(False)] = None
    return_prompt_text: Annotated[Any, refused(False)] = None
    return_assistant_tokens_mask: Annotated[Any, refused(False)] = None
    return_hidden_states: Annotated[Any, refused(False)] = None
    return_routed_experts: Annotated[Any, refused(False)] = None

    # What constrains it.
    json_schema: Annotated[SchemaOrText | None, other_name("guided_json", {}, "")] = None
    guided_json_object: Annotated[Any, refused(False, advice=_SCHEMA)] = None
    guided_whitespace_pattern: Annotated[Any, refused()] = None
    regex: Annotated[str | None, other_name("guided_regex", "")] = None
    ebnf: Annotated[Any, refused("", advice="Use 'guided_grammar', which is Lark.")] = None
    gbnf: Annotated[Any, refused("", advice="Use 'guided_grammar', which is Lark.")] = field(
        name="grammar", default=None
    )
    grammar_lazy: Annotated[Any, refused(False)] = None
    thinking_token_budget: Annotated[Budget | None, other_name("thinking_budget", -1)] = None
    thinking_budget_tokens: Annotated[Budget | None, other_name("thinking_budget", -1)] = None
    reasoning_budget_tokens: Annotated[Budget | None, other_name("thinking_budget", -1)] = None

    # What the model is given.
    chat_template: Annotated[Any, refused("", advice="Use '--chat-template'.")] = None
    role_mapping: Annotated[Any, refused({})] = None
    documents: Annotated[Any, refused([], advice="Put them into a message.")] = None
    prompt_embeds: Annotated[Any, refused([])] = None
    truncate_prompt_tokens: Annotated[Any, refused()] = None
    session_params: Annotated[Any, refused({})] = None
    mm_processor_kwargs: Annotated[Any, refused({})] = None
    media_io_kwargs: Annotated[Any, refused({})] = None
    resize_shape: Annotated[Any, refused()] = None
    thinking_start_token: Annotated[Any, refused()] = None
    thinking_end_token: Annotated[Any, refused()] = None
    extra_key: Annotated[Salt | None, other_name("cache_salt", "")] = None
    lora: Annotated[Any, refused([], advice=_ADAPTER)] = None
    lora_path: Annotated[Any, refused("", advice=_ADAPTER)] = None
    adapters: Annotated[Any, refused("", [], advice=_ADAPTER)] = None
    adapter_path: Annotated[Any, refused("", advice=_ADAPTER)] = None

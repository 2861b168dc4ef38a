"""Settings of the prompts: which files, which fields, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class PromptFlags:
    """The flags that messages about a set of prompts name: those of training, or of an evaluation."""

    prompt_data: str = "--prompt-data"
    prompt_len: str = "--rollout-max-prompt-len"
    response_len: str = "--rollout-max-response-len"
    samples: str = "--n-samples-per-prompt"


TRAINING_FLAGS = PromptFlags()


class DataConfig(BaseModel):
    """Prompts"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_data: tuple[str, ...] = Field(
        (),
        description="prompt files, .jsonl or .parquet; FILE@[a:b]: a slice of the rows (default: the built-in example)",
    )
    data_source_path: str | None = Field(
        None, description="module.Class that gives the prompts in the place of --prompt-data files"
    )
    input_key: str = Field("prompt", min_length=1, description="field of the prompt: text, or a list of chat messages")
    label_key: str | None = Field(
        "label", description="field of the label that the reward compares with (none: no label)"
    )
    metadata_key: str | None = Field("metadata", description="field of a mapping that is carried along with the sample")
    source_key: str | None = Field(None, description="field of the name by which metrics are also reported")
    apply_chat_template: bool = Field(
        False, description="render a text prompt as a user message by the model's chat template"
    )
    rollout_shuffle: bool = Field(True, description="shuffle the prompts anew in each epoch, by --seed")
    rollout_max_prompt_len: int | None = Field(
        None,
        ge=1,
        description="longest prompt in tokens; longer ones are skipped and counted (default: all that fit the context)",
    )
    skip_bad_rows: bool = Field(False, description="skip and count rows that cannot be used, instead of stopping")

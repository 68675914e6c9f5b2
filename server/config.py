"""The settings of the server: every flag, its `OCTAVO_*` variable and its key in the configuration file, written once.

The only file that reads the environment. A setting that cannot be used raises SettingsError with one sentence that
names it as the user wrote it. Must not know FastAPI, torch or what a model contains.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ByteSize, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from server.engine_config import EngineConfig
from server.processors import openmp_defaults
from server.settings_error import SettingsError, sentence_of, suggestion
from server.settings_file import read_settings_file

ENV_PREFIX = "OCTAVO_"
# Kubernetes describes a service called octavo, or octavo-something, to every pod of its namespace in such variables.
_SERVICE_LINK = re.compile(r"OCTAVO_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
_ROOT_PATH = re.compile(r"(/[^/\s?#]+)*")
_MAX_TOKENS = 1 << 24
_MAX_SECONDS = 7 * 86400
_MOST_GIB = 1024  # a bare number up to it is one of GiB, as vLLM's --swap-space takes them
_SWITCHES = frozenset(
    {
        "allow_credentials",
        "async_scheduling",
        "batch_invariant",
        "enable_dashboard",
        "enable_log_requests",
        "enable_prefix_caching",
        "enforce_eager",
    }
)
_LISTS = ("served_model_name", "api_key", "allowed_origins", "allowed_methods", "allowed_headers")
_SECRETS = ("api_key", "admin_api_key")
_HIDDEN = (*_SECRETS, "otlp_traces_endpoint")  # whose values no error shows; a URL may hold a password

Names = Annotated[tuple[str, ...], NoDecode]  # from the environment: separated by commas, not JSON


class Settings(BaseSettings):
    """All settings. The names and meanings follow vLLM's where the idea is the same."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,  # deployment files often pass a variable that is set to nothing
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # keys must not reach a log
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
        cli_show_env_vars=True,
    )

    config: Path | None = Field(None, description="TOML file with settings; flags and variables go before it.")
    home: Path = Field(Path("~/.cache/octavo"), description="Folder that models and packed weights are kept in.")

    model: str = Field(
        "smollm2",
        min_length=1,
        description="Model to serve: a known name (smollm2, gemma3-270m), a directory in Hugging Face layout, "
        "a .gguf file, or a hub id (org/name).",
    )
    served_model_name: Names = Field(
        (), description="Name of the model in the API; repeat it for more names. Without it: the value of --model."
    )

    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="Form in which the model writes tool calls; auto: the one of its chat template."
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 is every IPv4 one.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes any that is free.")
    api_key: Names = Field(
        (),
        repr=False,
        description="Key that requests must carry, as key or name:key; repeat it for more keys. Without it: no keys.",
    )
    api_key_file: Path | None = Field(
        None, description="File of more keys, each on a line of its own; read again when it changes."
    )
    admin_api_key: str | None = Field(
        None, repr=False, min_length=1, description="Key that opens every route, and alone opens /metrics."
    )
    allowed_origins: Names = Field(
        (), description="Origin whose web pages may use the API (CORS), * for all; repeat it for more. Default: none."
    )
    allowed_methods: Names = Field(("*",), description="Method that such pages may use.")
    allowed_headers: Names = Field(("*",), description="Request header that such pages may send.")
    allow_credentials: bool = Field(False, description="Such pages may send cookies; needs origins by name.")
    root_path: str = Field("", description="Path that a proxy puts before ours, such as /llm.")
    max_body_size: ByteSize = Field(
        ByteSize(16 << 20), ge=1024, le=1 << 30, description="Largest request body, in bytes or such as 16MiB."
    )
    max_open_requests: int = Field(
        16384, ge=1, le=1 << 20, description="Most requests that are answered at once, those that wait included."
    )
    max_open_body_memory: ByteSize = Field(
        ByteSize(1 << 30), ge=1024, le=1 << 40, description="Most bytes that the bodies of open requests have together."
    )
    shutdown_timeout: float = Field(
        30.0, ge=0, le=86400, description="Seconds that running requests get to finish after SIGTERM."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["human", "json"] = Field(
        "human", description="Form of log lines: for people, or one JSON object each for log collectors."
    )
    enable_log_requests: bool = Field(False, description="Log the bodies of requests, prompts included.")
    max_log_len: int = Field(2048, ge=0, le=1 << 20, description="Most bytes of a body that are logged.")

    otlp_traces_endpoint: str | None = Field(
        None, min_length=1, description="URL that OpenTelemetry spans of requests are sent to; needs octavo[tracing]."
    )
    enable_dashboard: bool = Field(
        True, description="Serve the dashboard at /dashboard; with keys its data needs the admin key."
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and KV cache, if not rounded; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    quantization: Literal["auto", "none", "int8", "gguf"] = Field(
        "auto",
        description="What weights are rounded to: int8; gguf: the file's own 4-bit blocks, int8 for its others; none. "
        "auto: with the native CPU kernels gguf for a .gguf file, int8 for others; none elsewhere or with --dtype.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs; auto: a GPU if any.")
    attention_backend: Literal["auto", "cpu", "torch", "triton", "reference"] = Field(
        "auto", description="Attention kernels; auto: the fastest that runs on the device."
    )
    cpu_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads of the CPU kernels; else OMP_NUM_THREADS, or one per core allowed."
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = Field(
        "auto",
        description="Type of the KV cache; auto: bfloat16 beside weights that are rounded on a CPU, else the model's "
        "own. int8 and fp8 halve it again, with a scale per head.",
    )
    batch_invariant: bool = Field(
        False, description="A request's tokens are bitwise the same whatever else runs beside it; slower on a GPU."
    )
    async_scheduling: bool | None = Field(
        None, description="Schedule a step while the one before it still runs; by default on a GPU only."
    )
    enforce_eager: bool = Field(False, description="Run without CUDA graphs.")

    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, le=1 << 30, description="Number of KV blocks, instead of what fits in memory."
    )
    kv_cache_memory: ByteSize | None = Field(
        None, ge=1, le=1 << 50, description="Bytes for the KV cache, or such as 2GiB; by default part of what is free."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Part of the GPU's memory for weights, activations and KV cache together."
    )
    max_model_len: int | None = Field(
        None, ge=1, le=_MAX_TOKENS, description="Most tokens of a prompt and its answer; by default the model's own."
    )
    max_num_seqs: int | None = Field(
        None, ge=1, le=65536, description="Most sequences that run at once; by default 64 on a CPU, 256 on a GPU."
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=_MAX_TOKENS,
        description="Most tokens that one step computes; by default 512 on a CPU, 8192 on a GPU.",
    )
    long_prefill_token_threshold: int | None = Field(
        None,
        ge=0,
        le=_MAX_TOKENS,
        description="Most tokens of one prompt in one step while others wait; 0: no cap. By default a quarter of those "
        "that a step computes.",
    )
    enable_prefix_caching: bool = Field(
        True, description="Keep the KV blocks of what was computed, for later requests that begin alike."
    )
    swap_space: ByteSize | None = Field(
        None,
        ge=0,
        le=1 << 50,
        description="Host memory for KV blocks of preempted sequences, in bytes or such as 4GiB; a bare number up to "
        "1024 counts GiB; 0: they are always computed again. By default up to 4GiB beside a GPU, none on a CPU.",
    )
    max_num_queued_reqs: int = Field(
        8192, ge=0, le=1 << 24, description="Most requests that wait to be run; further ones get 429. 0: no limit."
    )
    max_num_queued_tokens: int = Field(
        1 << 22, ge=0, le=1 << 40, description="Most tokens that their prompts have together. 0: no limit."
    )
    queue_timeout: float | None = Field(
        None, gt=0, le=_MAX_SECONDS, description="Seconds that a request may wait to be run; then it gets 503."
    )
    request_timeout: float | None = Field(
        None, gt=0, le=_MAX_SECONDS, description="Seconds in which an answer must be complete; else it gets 504."
    )
    priority_ageing: float = Field(
        30.0,
        ge=0,
        le=_MAX_SECONDS,
        description="Seconds of waiting that lift a request by one of the priorities that wait; 0: never.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only what load_settings has merged: an error must be able to say where a value came from."""
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name not in _SWITCHES:  # `port = true` in a file would count as 1
            raise ValueError("takes no true or false")
        return value

    @field_validator(*_LISTS, mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        if isinstance(value, str) and not value.startswith("["):
            return [part.strip() for part in value.split(",")]
        if isinstance(value, str):
            return [value]
        return value

    @field_validator("swap_space", mode="before")
    @classmethod
    def _read_gib(cls, value: object) -> object:
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
        except ValueError:
            return value
        return int(number * (1 << 30)) if 0 <= number <= _MOST_GIB else value

    @field_validator("root_path")
    @classmethod
    def _refuse_half_paths(cls, value: str) -> str:
        if not _ROOT_PATH.fullmatch(value):
            raise ValueError("must be a path such as /llm, without a slash at its end")
        return value

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _refuse_other_protocols(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/\s]+\S*", value):
            raise ValueError("must be an http or https URL, such as http://localhost:4318: OTLP over HTTP, not gRPC")
        return value

    @field_validator("allowed_origins", "allowed_methods", "allowed_headers", mode="after")
    @classmethod
    def _read_json_lists(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """As vLLM takes them: '["*"]'."""
        return tuple(name for part in value for name in (_json_list(part) if part.startswith("[") else (part,)))

    @field_validator(*_LISTS)
    @classmethod
    def _refuse_empty_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(part.strip() for part in value):
            raise ValueError("must not be empty")
        return value

    @model_validator(mode="after")
    def _refuse_credentials_for_all(self) -> Self:
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise PydanticCustomError("cors", "--allow-credentials needs --allowed-origins by name, and not *.")
        return self

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that requests may ask for; the first one answers."""
        return self.served_model_name or (self.model,)

    def engine_config(self, model_path: Path) -> EngineConfig:
        """Only what the engine needs, for the model found at `model_path`."""
        shared = {field.name: getattr(self, field.name) for field in fields(EngineConfig) if field.name != "model_path"}
        plain_types = {ByteSize: int, type(self.home): str}  # msgpack takes no others
        plain: dict[str, Any] = {name: plain_types.get(type(v), lambda v: v)(v) for name, v in shared.items()}
        return EngineConfig(model_path=str(model_path), **plain)


def _json_list(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        raise ValueError("must be a name or a JSON list of names") from None
    if not all(isinstance(name, str) for name in names):
        raise ValueError("must be a name or a JSON list of names")
    return list(names)


def flag_of(field: str) -> str:
    """The flag that sets a field."""
    return "--" + field.replace("_", "-")


def variable_of(field: str) -> str:
    """The environment variable that sets a field."""
    return ENV_PREFIX + field.upper()


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """Merge flags (field name -> text), the environment and the configuration file, in this order of precedence.

    Raises:
        SettingsError: naming the first setting that cannot be used, as the user wrote it.
    """
    _refuse_unknown_variables()
    env: dict[str, Any] = EnvSettingsSource(Settings)()
    if _SERVICE_ADDRESS.fullmatch(str(env.get("port"))):
        del env["port"]  # a service's address, not ours
    path = flags.get("config") or env.get("config")
    file = {} if path is None else read_settings_file(Path(path), list(Settings.model_fields))
    if "config" in file:
        raise SettingsError(f"The setting config cannot stand in the configuration file {path} itself.")
    try:
        return Settings(**{**file, **env, **flags})
    except ValidationError as error:
        details = error.errors()[0]
        if not details["loc"]:  # several settings that do not go together
            raise SettingsError(details["msg"]) from None
        field = str(details["loc"][0])
        if field in flags:
            name = flag_of(field)
        elif field in env:
            name = variable_of(field)
        else:
            name = f"{field} in {path}"
        value = flags.get(field, env.get(field, file.get(field)))
        raise SettingsError(sentence_of(name, details, secret=field in _HIDDEN, value=value)) from None


def client_api_key() -> str | None:
    """The key with which a client of ours asks a server, from the variable that OpenAI's own clients read."""
    return os.environ.get("OPENAI_API_KEY", "").strip() or None


def engine_environment() -> dict[str, str]:
    """The environment of the engine process: it finds our packages, and runs few OpenMP threads, which spin little.

    The edge shares the engine's cores, and a thread that spins on a core another one needs holds up the whole step.
    OpenMP would complain of a variable that is set to nothing, and take all cores: it counts as unset, as ours do.
    """
    packages = str(Path(__file__).parents[1])  # a checkout that is not installed is importable there too
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    own = {name: value for name, value in os.environ.items() if value or not name.startswith(("OMP_", "GOMP_"))}
    return {"GOMP_SPINCOUNT": "1000", **openmp_defaults(), **own, "PYTHONPATH": path}


def _refuse_unknown_variables() -> None:
    known = [variable_of(field) for field in Settings.model_fields]
    for variable in sorted(os.environ):
        name = variable.upper()
        if name.startswith(ENV_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name):
            raise SettingsError(f"There is no setting for the variable {variable}{suggestion(name, known)}")
    for field in (*_SECRETS, "api_key_file"):
        variable = variable_of(field)
        if os.environ.get(variable, "unset").strip() == "":
            # Elsewhere an empty variable counts as none; here a missing secret would open the server to everybody.
            raise SettingsError(f"{variable} is set and empty; unset it to serve without keys.")

"""Settings: where a value comes from, which goes first, and the sentence that a wrong one gets."""

import os
from pathlib import Path

import msgspec
import pytest

from kernels.attention.backend import BACKEND_NAMES
from server.config import Settings, flag_of, load_settings, variable_of
from server.engine_config import EngineConfig
from server.settings_error import SettingsError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OCTAVO_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "octavo.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_defaults():
    settings = load_settings({})
    assert (settings.model, settings.host, settings.port, settings.block_size) == ("smollm2", "127.0.0.1", 8000, 16)
    assert settings.served_names == ("smollm2",)
    assert settings.api_key == ()


def test_flags_go_before_variables_before_the_file(monkeypatch, config_file):
    path = config_file('port = 1\nhost = "file"\nmax-num-seqs = 11\nserved_model_name = ["a", "b"]\n')
    monkeypatch.setenv("OCTAVO_PORT", "2")
    monkeypatch.setenv("OCTAVO_HOST", "env")
    settings = load_settings({"config": path, "port": "3"})
    assert (settings.port, settings.host, settings.max_num_seqs) == (3, "env", 11)
    assert settings.served_names == ("a", "b")
    assert settings.block_size == 16


def test_the_file_can_be_named_by_a_variable(monkeypatch, config_file):
    monkeypatch.setenv("OCTAVO_CONFIG", config_file("port = 77\n"))
    assert load_settings({}).port == 77


def test_empty_variables_are_as_good_as_none(monkeypatch):
    monkeypatch.setenv("OCTAVO_PORT", "")
    assert load_settings({}).port == 8000


def test_lists_in_variables_are_split_at_commas(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "one, two")
    assert load_settings({}).api_key == ("one", "two")


def test_keys_show_nowhere(monkeypatch, config_file):
    assert "hidden" not in repr(load_settings({"api_key": "hidden", "admin_api_key": "hidden"}))
    with pytest.raises(SettingsError) as error:
        load_settings({"config": config_file('api_key = ["hidden", 5]\n')})
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("2GiB", 2 << 30), ("1.5GB", 1_500_000_000), ("512MiB", 512 << 20), ("4096", 4096)]
)
def test_sizes(text, num_bytes):
    assert load_settings({"kv_cache_memory": text}).kv_cache_memory == num_bytes


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("max_num_seqs", "x", "must be a valid integer, not 'x'."),
        ("max_num_seqs", "0", "must be greater than or equal to 1, not '0'."),
        ("max_num_seqs", "1e99", "must be a valid integer, not '1e99'."),
        ("port", "65536", "must be less than or equal to 65535, not '65536'."),
        ("gpu_memory_utilization", "0", "must be greater than 0, not '0'."),
        ("gpu_memory_utilization", "nan", "must be a finite number, not 'nan'."),
        ("shutdown_timeout", "inf", "must be a finite number, not 'inf'."),
        ("dtype", "int8", "must be 'auto', 'float32', 'bfloat16' or 'float16', not 'int8'."),
        ("kv_cache_memory", "2GX", ": could not interpret byte unit: GX, not '2GX'."),
        ("kv_cache_memory", "much", ": could not parse value and unit from byte string, not 'much'."),
        ("served_model_name", "a,,b", "must not be empty, not 'a,,b'."),
        ("root_path", "llm/", "must be a path such as /llm, without a slash at its end, not 'llm/'."),
        ("allowed_origins", "[5]", "must be a name or a JSON list of names, not '[5]'."),
        ("max_log_len", "-1", "must be greater than or equal to 0, not '-1'."),
    ],
)
def test_sentence_names_the_setting_as_it_was_written(monkeypatch, config_file, field, value, sentence):
    sentence = sentence.replace("must not be empty, not 'a,,b'.", "must not be empty.")
    space = "" if sentence.startswith(":") else " "
    with pytest.raises(SettingsError) as error:
        load_settings({field: value})
    assert str(error.value) == f"{flag_of(field)}{space}{sentence}"

    monkeypatch.setenv(variable_of(field), value)
    with pytest.raises(SettingsError) as error:
        load_settings({})
    assert str(error.value) == f"{variable_of(field)}{space}{sentence}"

    monkeypatch.delenv(variable_of(field))
    path = config_file(f'{field} = "{value}"\n')
    with pytest.raises(SettingsError) as error:
        load_settings({"config": path})
    assert str(error.value) == f"{field} in {path}{space}{sentence}"


def test_the_variables_of_a_kubernetes_service_are_not_settings(monkeypatch):
    for name, value in {
        "OCTAVO_PORT": "tcp://10.0.0.1:8000",
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_SERVICE_PORT_HTTP": "8000",
        "OCTAVO_PORT_8000_TCP_ADDR": "10.0.0.1",
        "OCTAVO_CANARY_SERVICE_HOST": "10.0.0.2",
        "OCTAVO_CANARY_PORT": "tcp://10.0.0.2:8000",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_settings({}).port == 8000


@pytest.mark.parametrize("value", ["", "  "])
@pytest.mark.parametrize("variable", ["OCTAVO_API_KEY", "OCTAVO_ADMIN_API_KEY", "OCTAVO_API_KEY_FILE"])
def test_an_empty_key_in_the_environment_is_refused(monkeypatch, value, variable):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"{variable} is set and empty"):
        load_settings({})


def test_unknown_variable(monkeypatch):
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQ", "3")
    with pytest.raises(SettingsError, match=r"OCTAVO_MAX_NUM_SEQ; did you mean OCTAVO_MAX_NUM_SEQS\?$"):
        load_settings({})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1\n", "There is no setting prot .*did you mean port"),
        ("port = = 1\n", "not valid TOML"),
        ("port = true\n", "takes no true or false"),
        ('config = "x"\n', "itself"),
        ("[server]\nport = 1\n", "There is no setting server"),
    ],
)
def test_wrong_file(config_file, text, message):
    with pytest.raises(SettingsError, match=message):
        load_settings({"config": config_file(text)})


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({"config": str(tmp_path / name)})


def test_engine_config_survives_msgpack(tmp_path):
    settings = load_settings({"kv_cache_memory": "1GiB", "max_model_len": "128", "cpu_threads": "2"})
    config = settings.engine_config(tmp_path / "model.gguf")
    assert (config.kv_cache_memory, config.max_model_len, config.cpu_threads) == (1 << 30, 128, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_every_attention_backend_can_be_chosen():
    annotation = Settings.model_fields["attention_backend"].annotation
    assert set(annotation.__args__) == set(BACKEND_NAMES)


@pytest.mark.parametrize("written", ["a,b", ["a", "b"], '["a", "b"]', ['["a"]', "b"]])
def test_lists_may_be_written_as_vllm_takes_them(written):
    assert load_settings({"allowed_origins": written}).allowed_origins == ("a", "b")


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4", 4 << 30), ("0.5", 1 << 29), ("0", 0), ("512MiB", 512 << 20), ("2147483648", 2 << 30)]
)
def test_swap_space_takes_gib_as_vllm_does_and_sizes(text, num_bytes):
    assert load_settings({"swap_space": text}).engine_config(Path("/m")).swap_space == num_bytes


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e99", "many"])
def test_a_swap_space_that_is_none_is_refused(text):
    with pytest.raises(SettingsError, match="--swap-space"):
        load_settings({"swap_space": text})


def test_a_switch_for_the_swap_space_in_a_file_is_no_gibibyte(config_file):
    with pytest.raises(SettingsError, match="swap_space"):
        load_settings({"config": config_file("swap_space = true\n")})


def test_nothing_of_the_engines_part_is_left_behind():
    """Each of its fields is a setting of the same name."""
    chosen = {"enable_prefix_caching": "false", "max_num_queued_reqs": "7", "max_num_queued_tokens": "9"}
    config = load_settings({**chosen, "priority_ageing": "1.5", "kv_cache_memory": "2GiB"}).engine_config(Path("/m"))
    assert (config.enable_prefix_caching, config.max_num_queued_reqs, config.max_num_queued_tokens) == (False, 7, 9)
    assert (config.priority_ageing, config.kv_cache_memory, config.model_path) == (1.5, 2 << 30, "/m")
    assert type(config.kv_cache_memory) is int

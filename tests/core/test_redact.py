"""Secrets go, by name and by shape; everything else stays to the character."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.core.redact import REDACTED, is_secret_name, redact, redact_mapping, shape_of_secret

# Made for this test in the shapes that the services document; none is or was anybody's.
SHAPED = {
    "Hugging Face": "hf_" + "AbCd" * 8 + "xY",
    "GitHub": "ghp_" + "a1B2" * 9,
    "GitHub, fine-grained": "github_pat_" + "11ABCDEFG0" * 2 + "_" + "abcDEF1234" * 5,
    "GitLab": "glpat-" + "x9Y8z7W6v5" * 2,
    "AWS": "AKIA" + "ABCDEFGHIJ234567",
    "OpenAI": "sk-" + "abcd1234" * 6,
    "OpenAI, of a project": "sk-proj-" + "abcd1234" * 6,
    "Anthropic": "sk-ant-api03-" + "abcd1234" * 6,
    "Google": "AIza" + "Sy" + "a" * 33,
    "Slack": "xoxb-123456789012-" + "abcdefABCDEF",
    "web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
}
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\nAAAA\n-----END OPENSSH PRIVATE KEY-----"

SECRET_NAMES = """
HF_TOKEN HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN TOKEN token api-key api_key apiKey accessToken WANDB_API_KEY
OPENAI_API_KEY AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN PGPASSWORD MYSQL_PASSWORD DB_PASS db_passwd SECRET
client_secret SLURM_JWT SSH_PRIVATE_KEY AZURE_STORAGE_KEY GOOGLE_CREDENTIALS password TOKEN_2 SECRET_KEY
KEY_PASSPHRASE
""".split()
ORDINARY_NAMES = """
NCCL_IB_PKEY NCCL_FOO_KEY RCCL_TOKEN_KEY TOKENIZERS_PARALLELISM tokenizer tokens tokens_per_s
tokenizer_sha256 MAX_TOKENS
text_key prompt_key completion-key KEYBOARD SORT_KEY PUBLIC_KEY SSH_KEY_PATH HF_TOKEN_PATH PASSWORD_FILE end_token
eos_token pad_token token_id token_count PWD OLDPWD NUM_PASSES forward_pass PATH monkey SECRETARY KEY key
path author
""".split()


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("service", SHAPED)
@pytest.mark.parametrize(
    "around", ["{}", "see {} here", "x={}", "'{}'", '{{"a": ["{}"]}}', "https://h/?q={}&r=1", "({}),"]
)
def test_a_shape_gives_a_secret_away_whatever_it_is_called(service: str, around: str) -> None:
    text = around.format(SHAPED[service])
    assert redact(text) == around.format(REDACTED)
    assert shape_of_secret(text)


def test_private_keys_go_whole_and_also_where_their_end_is_missing() -> None:
    assert redact(f"a\n{PEM}\nb") == f"a\n{REDACTED}\nb"
    assert redact(PEM[:60]) == REDACTED
    assert redact("".join(f"+{line}\n" for line in PEM.splitlines())) == f"+{REDACTED}\n"


def test_passwords_in_urls_and_headers_go_and_the_rest_of_the_url_stays() -> None:
    assert redact("git clone https://me:s3cr3t@host/repo.git") == f"git clone https://me:{REDACTED}@host/repo.git"
    assert redact("curl -H 'Authorization: Bearer abc.def'") == f"curl -H 'Authorization: Bearer {REDACTED}'"
    assert shape_of_secret("s3://k:p@bucket/x") == "a URL with a password"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("export HF_TOKEN=abc", f"export HF_TOKEN={REDACTED}"),
        ("export HF_TOKEN='a b'\"'\"'c' # x", f"export HF_TOKEN='{REDACTED}' # x"),
        ("A=1 WANDB_API_KEY=abc run", f"A=1 WANDB_API_KEY={REDACTED} run"),
        ("cmd --password hunter2 --nodes 2", f"cmd --password {REDACTED} --nodes 2"),
        ("cmd --api-key=k", f"cmd --api-key={REDACTED}"),
        ('{"password": "hunter2", "nodes": 2}', f'{{"password": "{REDACTED}", "nodes": 2}}'),
        ("  password: hunter2\n  nodes: 2", f"  password: {REDACTED}\n  nodes: 2"),
        ("+client_secret = 'x y'", f"+client_secret = '{REDACTED}'"),
    ],
)
def test_a_name_gives_its_value_away(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "export HF_TOKEN=$HF_TOKEN",
        'export HF_TOKEN="$(cat ~/.token)"',
        "def login(token: str, password: str | None = None) -> None:",
        "    token: str",
        "token = tokenizer.encode(text)",
        "--end-token '<eos>' --text-key body",
        "tokens: 8e12",
        "password:",
        "commit 284c3b95284c3b95284c3b95284c3b95284c3b95",
        "user@host:/path https://host:8080/a@b http://host/x",
        "hf_transformers_are_fine sk-learn risk-averse-investors-are-fine-here AKIA ghp_short eyJhbGci",
        "#SBATCH --export=ALL",
        "export NCCL_IB_PKEY=7",
        "-----BEGIN PUBLIC KEY-----\nabc\n-----END PUBLIC KEY-----",
        "step 1/400 loss 8.3 1.2k tokens/s",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text
    assert shape_of_secret(text) is None


def test_data_is_redacted_however_deep_and_stays_data() -> None:
    body = {
        "env": {"HF_TOKEN": "abc", "A": "1", "N": 3, "EMPTY_TOKEN": ""},
        "words": ["x", SHAPED["AWS"], {"password": "p", "none": None}],
        "tokens": ["a", "b"],
        "secret": ["a", "b"],
    }
    assert redact_mapping(body) == {
        "env": {"HF_TOKEN": REDACTED, "A": "1", "N": 3, "EMPTY_TOKEN": ""},
        "words": ["x", REDACTED, {"password": REDACTED, "none": None}],
        "tokens": ["a", "b"],
        "secret": [REDACTED, REDACTED],
    }


@given(value=st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=6, max_size=30))
def test_no_value_of_a_secret_variable_survives_in_a_script(value: str) -> None:
    if value.strip().strip("'\"").startswith(("$", "<", "[redacted]")) or not value.strip(" '\""):
        return  # a reference, or nothing
    if value.strip().strip("'\"").isdigit() or len(set(value) - set(" '\"")) < 3:
        return
    shown = redact(f"export HF_TOKEN={shlex.quote(value)}\n")
    assert value not in shown
    assert shown.startswith("export HF_TOKEN=")
    assert json.dumps(value) not in redact(json.dumps({"HF_TOKEN": value}))


def test_values_that_are_known_go_wherever_they_stand() -> None:
    assert (
        redact("open sesame-9 failed: sesame-9", known=["sesame-9", ""]) == f"open {REDACTED} failed: {REDACTED}"
    )
    assert redact("a b c", known=["a"]) == "a b c", "a value of few characters is in every text"


@given(text=st.text(max_size=200))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize("piece", ["y", "_", "a.", "a-", "eyJ"])
def test_a_long_line_without_a_space_is_looked_through_and_its_secret_found(piece: str) -> None:
    """Were the time quadratic in its length, as it was, this would take a quarter of an hour."""
    line = piece * (100_000 // len(piece))
    assert redact(f"{line}_TOKEN=hunter22 end") == f"{line}_TOKEN={REDACTED} end"
    assert redact(f"{line}_TOKEN: 'hunter22' end").endswith(f"_TOKEN: '{REDACTED}' end")

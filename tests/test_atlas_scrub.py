"""What `run.sh atlas` takes out of texts, and what it leaves."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY / "benchmarks"))

from atlas import scrub  # noqa: E402

PLACES = {
    "/work/trillian/custom": "repository",
    "/work/trillian/custom/.venv": "environment",
    "/home/trillian": "home",
    "/tmp": "tmp",
    "/opt/vendor one/pkg": "kernel package 1",
}
SCRUBBER = scrub.Scrubber(PLACES, ["magrathea.example.org"], ["trillian", "root"])
SECRETS = [*filter("/tmp".__ne__, PLACES), "magrathea.example.org", "magrathea", "trillian"]


@given(
    st.text(max_size=30), st.sampled_from([s for s in SECRETS if s != "/tmp"]), st.text(max_size=30)
)
def test_no_text_around_a_name_keeps_it(before, secret, after):
    scrubbed = SCRUBBER(before + secret + after)
    assert SCRUBBER.left_in(scrubbed) == []
    if "/" in secret and not re.match(r"[\w.-]", after):
        assert secret not in scrubbed
    assert SCRUBBER.left_in(SCRUBBER(scrubbed)) == []


COMPONENT = st.text("abcXYZ019_-.é", min_size=1, max_size=8).filter(lambda s: s.strip("."))


@given(
    st.lists(COMPONENT, min_size=2, max_size=6),
    st.sampled_from(
        ["", " ", "=", ":", '"', "'", "(", "[", "-I", "-L", "\n", "\\n", "2>", "file://"]
    ),
    st.sampled_from(["", " ", ":12", '"', "'", ")", "]", ",", "\n", "\x1b[0m"]),
)
def test_of_any_other_path_the_last_component_remains(components, before, after):
    path = "/" + "/".join(components)
    scrubbed = SCRUBBER(f"{before}{path}{after}")
    assert path not in scrubbed
    assert f"{components[-2]}/{components[-1]}" not in scrubbed


@pytest.mark.parametrize(
    "text, expected",
    [
        ("/work/trillian/custom/.venv/lib/a.py:3", "<environment>/lib/a.py:3"),
        ("/work/trillian/customs/a.py", "…/a.py"),
        ('File "/opt/vendor one/pkg/op_api/x.so"', 'File "<kernel package 1>/op_api/x.so"'),
        ('File "/data/a b/c d.py", line 3', 'File "…/c d.py", line 3'),
        ("/tmp/tmpx1/a/b.log and relative/tmp/b", "<tmp>/…/b.log and relative/tmp/b"),
        ("~trillian/x/y ~/z", "<home>/…/y <home>/z"),
        ("/home/ford /home/ford/a/b", "<home> <home>/…/b"),
        ("https://ford:pass@pypi.org/simple/x", "https://<user>@pypi.org/simple/x"),
        ("ford@betelgeuse.com", "<address>"),
        ("\x1b[31m/a/b/c\x1b[0m", "…/c"),
        ("10.0.0.5:80 fe80::1 aa:bb:cc:dd:ee:ff", "<address>:80 <address> <address>"),
        # what only looks like a name
        ("the root cause, user=root, /x/root/y", "the root cause, user=<user>, …/y"),
        (
            "version 8.0.0.1, torch==2.13.0.1, 24.1.rc3",
            "version 8.0.0.1, torch==2.13.0.1, 24.1.rc3",
        ),
        ("11:55:37 std::vector ad::dec a/b 1/2", "11:55:37 std::vector ad::dec a/b 1/2"),
        ("[ERROR] 2026-11-23-11:55:37 (PID:4139)", "[ERROR] 2026-11-23-11:55:37 (PID:4139)"),
        ("µs | 48.0 µs / call <= 0.5", "µs | 48.0 µs / call <= 0.5"),
    ],
)
def test_texts_stay_readable(text, expected):
    assert SCRUBBER(text) == expected


def test_hosts_and_users_that_are_words_are_no_names():
    plain = scrub.Scrubber({}, ["npu", "localhost", "a"], ["python", "i"])
    text = "a python on npu localhost, as i said"
    assert plain(text) == text and plain.left_in(text) == []
    assert plain("user=python /a/b/python") == "user=<user> …/python"


def test_the_scrubber_of_this_machine_knows_its_names(tmp_path):
    environment = {
        "USER": "zaphod",
        "HOSTNAME": "heart-of-gold.example.org",
        "ASCEND_CUSTOM_OPP_PATH": f"{tmp_path}/one:{tmp_path}/two",
        "ASCEND_HOME_PATH": "/opt/cann/9.1",
    }
    scrubbed = scrub.of_this_machine(environment, scratch=str(tmp_path / "run"))
    assert scrubbed(f"{tmp_path}/two/op_api {tmp_path}/run/a.log") == (
        "<kernel package 2>/op_api <scratch>/a.log"
    )
    assert scrubbed("zaphod@heart-of-gold") == "<user>@<host>"
    assert scrubbed("/opt/cann/9.1/opp/x") == "<CANN>/opp/x"
    assert scrubbed(f"{sys.prefix}/a {REPOSITORY}/b") == "<environment>/a <repository>/b"

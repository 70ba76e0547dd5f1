"""Takes out of a text what names a machine, its network or a person: paths, hosts, users."""

import getpass
import ipaddress
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CANN = ("ASCEND_OPP_PATH", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
# names that many machines and accounts have: they tell nobody apart, and are words of the logs
ORDINARY = frozenset(
    "admin administrator ascend atlas build builder centos ci cpu debian dev developer docker host "
    "hwhiaiuser jenkins linux localhost localdomain ma-user node nobody npu python root runner "
    "server test torch ubuntu user vagrant work worker workspace "
    # the names that stand for others
    "address cache cann environment home kernel name package repository scratch tmp".split()
)
# below these places the rest of a path is public: files of packages
PUBLIC = ("repository", "environment", "CANN", "kernel package")

# until the end < > … of replacements are these, so that those of the text are none
OPEN, CLOSE, CUT = "\ue000", "\ue001", "\ue002"
SHOWN = str.maketrans({OPEN: "<", CLOSE: ">", CUT: "…"})
NOT_YET = str.maketrans(dict.fromkeys((OPEN, CLOSE, CUT)))

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# where an absolute path may begin: not inside a relative one; after an escape, a compiler's flag
BEGIN = rf"(?:(?<=\\n)|(?<=\\t)|(?<=-[A-Za-z])(?<![\w-]-[A-Za-z])|(?<![\w.~{CLOSE}{CUT}]))"
NAME = rf"[^\s/\"'`<>|,;:()\[\]{{}}=*?\\{OPEN}]+"
NO_MORE = r"(?![\w-]|\.\w)"  # the component ends here
TAIL = rf"(?P<tail>(?:/+{NAME})*/*)"
HOMES = re.compile(rf"{BEGIN}(?:/+(?:export/+)?(?:home|Users)/+{NAME}|~[\w.-]*(?=/)){TAIL}")
QUOTED = re.compile(r"(?P<quote>[\"'`])(?P<path>/[^\"'`\n]+/[^\"'`\n]*)(?P=quote)")
PLAIN = re.compile(
    rf"(?P<url>\b(?!file:)[a-z][a-z+]*://\S+)|{BEGIN}(?P<path>/*(?:/{NAME}){{2,}})/*"
)
CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")
MAIL = re.compile(r"[\w.+-]+@[\w.-]+\.[A-Za-z]{2,}\b")
MAC = re.compile(r"(?<![\w:-])[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}(?![\w:-])")
# a version may have four parts as well; what stands before it tells
IPV4 = re.compile(r"(?<![\w.=+-])(?<![Vv]ersion )(?<![Vv]ersion: )\d+(?:\.\d+){3}(?!\w|\.\d)")
IPV6 = re.compile(r"(?<![\w:])[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:]*(?![\w:])")


class Scrubber:
    """A function of a text; the same for every member of an archive.

    Args:
        places: folder -> what replaces it: ``"repository"`` for ``<repository>``.
        hosts: names of the machine.
        users: names of the account.
    """

    def __init__(self, places: dict[str, str], hosts: Iterable[str], users: Iterable[str]):
        self.places = {}
        for path, name in places.items():
            for form in (os.path.normpath(path), os.path.realpath(path)):
                if os.path.isabs(form) and form.strip("/"):
                    self.places.setdefault(form, name)
        parts = {part for name in hosts for part in (name, name.partition(".")[0])}
        self.hosts = sorted(filter(identifies, parts), key=len, reverse=True)
        self.users = sorted(filter(None, set(users)), key=len, reverse=True)
        longest_first = sorted(self.places, key=len, reverse=True)
        self._places = [(_place(path), self.places[path]) for path in longest_first]

    def __call__(self, text: str) -> str:
        text = CREDENTIALS.sub(_shown("user") + "@", ANSI.sub("", text.translate(NOT_YET)))
        for pattern, name in self._places:
            text = pattern.sub(lambda match, name=name: _named(name, match["tail"]), text)
        text = HOMES.sub(lambda match: _named("home", match["tail"]), text)
        text = QUOTED.sub(lambda m: m["quote"] + _last(m["path"]) + m["quote"], text)
        text = PLAIN.sub(lambda match: match["url"] or _last(match["path"]), text)
        text = MAIL.sub(_shown("address"), text)
        for host in self.hosts:
            text = _word(host).sub(_shown("host"), text)
        for user in self.users:
            text = _account(user).sub(_shown("user"), text)
        text = MAC.sub(_shown("address"), text)
        text = IPV4.sub(_address, text)
        text = IPV6.sub(_address, text).translate(SHOWN)
        for name in self.left_in(text):  # as in a path that is glued to a word
            text = re.sub(re.escape(name), "<name>", text, flags=re.IGNORECASE)
        return text

    def left_in(self, text: str) -> list[str]:
        """What names this machine in a text: by plain comparison, not by the patterns above."""
        long = [path for path in self.places if path.count("/") > 1]
        found = [path for path in long if re.search(re.escape(path) + NO_MORE, text)]
        words = [*self.hosts, *filter(identifies, self.users)]
        return found + [name for name in words if re.search(_whole(name), text, re.IGNORECASE)]


def of_this_machine(environment: Mapping[str, str], **places: str) -> Scrubber:
    """The scrubber for texts written here.

    Args:
        environment: the variables of the process.
        places: further folders, by what replaces them: ``scratch="/tmp/x"`` for ``<scratch>``.
    """
    known = {path: name for name, path in places.items()}
    known[str(REPOSITORY)] = "repository"
    if sys.prefix not in ("/usr", "/usr/local"):  # which hold more than Python
        known[sys.prefix] = "environment"
    others = {
        **dict.fromkeys(map(environment.get, CANN), "CANN"),
        os.getcwd(): "work",
        os.path.expanduser("~"): "home",
        tempfile.gettempdir(): "tmp",
        environment.get("XDG_CACHE_HOME"): "cache",
    }
    packages = environment.get("ASCEND_CUSTOM_OPP_PATH", "").split(":")
    for number, path in enumerate(filter(None, packages), 1):
        known.setdefault(os.path.abspath(path), f"kernel package {number}")
    for path, name in others.items():
        known.setdefault(path or "", name)
    users = [environment.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
    try:
        users.append(getpass.getuser())
    except (KeyError, OSError):  # an account without a name, as in some containers
        pass
    users.append(os.path.basename(os.path.expanduser("~")))
    hosts = [socket.gethostname(), socket.getfqdn(), environment.get("HOSTNAME", "")]
    return Scrubber(known, hosts, users)


def identifies(name: str) -> bool:
    """Whether a host or an account of that name is one of few; a single letter is a word."""
    return len(name) > 1 and name.lower() not in ORDINARY and not name.isdecimal()


def _place(path: str) -> re.Pattern:
    # a short one, as /root, may be the end of a relative path
    begin = BEGIN if path.count("/") == 1 else ""
    return re.compile(f"{begin}{re.escape(path)}{NO_MORE}{TAIL}")


def _shown(name: str) -> str:
    return f"{OPEN}{name}{CLOSE}"


def _named(name: str, tail: str) -> str:
    """``<name>/a/b/c`` in full for a public place, else with the last component only."""
    whole = name.startswith(PUBLIC) or tail.strip("/").count("/") == 0
    return _shown(name) + (tail if whole else f"/{_last(tail)}")


def _last(path: str) -> str:
    return f"{CUT}/{path.rstrip('/').rpartition('/')[2]}"


def _whole(name: str) -> str:
    return rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"


def _word(name: str) -> re.Pattern:
    return re.compile(_whole(name), re.IGNORECASE)


def _account(user: str) -> re.Pattern:
    """A name that is a word of the logs is replaced only where an account must be meant."""
    if identifies(user):
        return _word(user)
    name, keys = re.escape(user), ("user=", "USER=", "user: ", "LOGNAME=", "owner=")
    after_a_key = "|".join(rf"(?<=\b{key})" for key in keys)
    return re.compile(rf"(?:{after_a_key}){name}(?!\w)|(?<!\w){name}(?=@)|(?<=/){name}(?=/)")


def _address(match: re.Match) -> str:
    try:
        ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    # a name of C++ such as ad::dec has no digit
    return _shown("address") if re.search(r"\d", match[0]) else match[0]

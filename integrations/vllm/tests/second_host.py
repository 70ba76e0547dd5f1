"""Another host on this machine, and the cable to it: ``second_host.py SECONDS LOSS``.

The cable is a process, which delays packets and loses some: not every kernel has ``tc netem``.
"""

import contextlib
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque

import pytest

NEAR, FAR = "198.18.7.1", "198.18.7.2"  # RFC 2544: for tests between hosts
TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000  # linux/if_tun.h


def forward(seconds: float, loss: float) -> None:
    """Takes each packet from one end to the other: the ends are file descriptors 0 and 1."""
    travelling = deque()
    while True:
        wait = max(0, travelling[0][0] - time.monotonic()) if travelling else None
        for end in select.select([0, 1], [], [], wait)[0]:
            packet = os.read(end, 65536)
            if random.random() >= loss:
                travelling.append((time.monotonic() + seconds, 1 - end, packet))
        while travelling and travelling[0][0] <= time.monotonic():
            _, end, packet = travelling.popleft()
            os.write(end, packet)


@contextlib.contextmanager
def cable(near: str, far: str, seconds: float, loss: float):
    """Two network devices; a packet takes ``seconds`` to the other one, or is lost."""
    ends = [os.open(TUN, os.O_RDWR) for _ in (near, far)]
    for end, name in zip(ends, (near, far), strict=True):
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    command = [sys.executable, __file__, str(seconds), str(loss)]
    process = subprocess.Popen(command, stdin=ends[0], stdout=ends[1])
    for end in ends:
        os.close(end)
    try:
        yield
    finally:
        process.kill()
        process.wait()  # the devices go with it


@contextlib.contextmanager
def second_host(seconds: float, loss: float):
    """The start of a command on another host, with its own network, name and shared memory; and
    the two ends of a cable to it.
    """
    name, near, far = (f"{kind}{os.getpid()}" for kind in ("host", "near", "far"))
    add = ["ip", "netns", "add", name]
    has_tools = shutil.which("ip") and os.path.exists(TUN)
    if not has_tools or subprocess.run(add, capture_output=True).returncode:
        pytest.skip(f"makes a network namespace, which needs `ip`, {TUN} and root")
    inside = ["ip", "-n", name]
    try:
        with cable(near, far, seconds, loss):
            for command in (
                ["ip", "link", "set", far, "netns", name],
                ["ip", "address", "add", f"{NEAR}/30", "dev", near],
                ["ip", "link", "set", near, "up"],
                [*inside, "address", "add", f"{FAR}/30", "dev", far],
                [*inside, "link", "set", far, "up"],
                [*inside, "link", "set", "lo", "up"],
            ):
                subprocess.run(command, check=True)
            own = 'mount -t tmpfs tmpfs /dev/shm && hostname second && exec "$@"'
            there = ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", own, "bash"]
            yield there, near, far
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


if __name__ == "__main__":
    forward(*map(float, sys.argv[1:]))

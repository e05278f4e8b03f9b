# SPDX-License-Identifier: Apache-2.0
"""Sessions that outlive their process.

A keeper (weir serve or weir handoff keep) has a duplicate of each TCP connection of a
service. docs/HANDOFF.md lists the guarantees. Standard library only, Linux, Python 3.9.

    member = Member("telemetry", "0")
    listener = member.listen("127.0.0.1", 1790)   # the predecessor's, or a new one
    while True:
        try:
            session = member.accept()             # a new connection, or another member's session
        except Replaced:
            break                                 # transfer the remaining sessions, and end
        except OSError as e:
            if e.errno not in SHORT:
                raise
            time.sleep(0.1)                       # until descriptors are free: the connection waits
            continue
        ...

    data = session.recv(65536)                    # b"" at the end; leaves the bytes in the socket
    session.send(answer)
    session.commit(state, unparsed)               # the next owner continues here
    member.transfer(session, "1", state, unparsed)

Sockets are non-blocking, because all processes share that flag. Select on member.fileno() and
session.fileno(). A Member is not safe for use by several threads.
"""

import array
import collections
import ctypes
import errno
import fcntl
import math
import os
import select
import socket
import struct
import termios
import time
import weakref

# Errors of accept for a lack of descriptors or memory. Call it again a little later.
SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

DEFAULT_SOCKET = "/run/weir/handoff.sock"  # unless $WEIR_HANDOFF_SOCKET is set

# version, type, flags, seq, session, read, written, number, name, 0, text, state, unread
_HEADER = struct.Struct("<BBHIQQQIBBHII")
_MASK = (1 << 64) - 1
_VERSION = 1
_INLINE = 64 << 10
_HELLO, _READY, _LEAVE, _KEEP, _COMMIT, _DROP, _TRANSFER, _TOOK, _REFUSE, _FIND = range(1, 11)
_WELCOME, _ERROR, _OK, _GIVE, _MOVE, _REPLACED, _REPORT, _ALONE = range(0x81, 0x89)
_AGREE, _LIMITS = 0x12, 0x92
_CRASHED, _STATE_FD = 1 << 1, 1 << 15
_MOVES, _EXACT, _STANDBY = 1 << 1, 1 << 2, 1 << 6
_READY_MOVES, _READY_STANDBY, _READY_ENDS = 2, 4, 8
_STREAM, _LISTENER = 1, 2
_LIMIT, _OWNED, _LOST = 7, 9, 12
_SO_COOKIE, _SO_PEEK_OFF, _SIOCATMARK = 57, 42, 0x8905
_TIMEOUT = 5.0  # seconds, for an answer of the keeper
_PATIENCE = 2.0  # for a keeper that does not read; then it counts as gone
_RETRY = 0.25  # between attempts to connect
_TRY, _TRY_LAST = 2.0, 60.0  # between attempts to hand over sessions returned by a newer process
_LOOK = 0.05  # between checks of that process's proof
_NO_DESCRIPTORS = "no descriptors are left (RLIMIT_NOFILE)"


class HandoffError(OSError):
    """A rejection by the keeper, or its absence. code is the protocol's code, 0 for none."""

    def __init__(self, text, code=0):
        super().__init__(text)
        self.code = code


class Replaced(Exception):
    """A newer process of this name has proved itself. Transfer the remaining sessions to
    it, and end.
    """


class Moved(HandoffError):
    """Another process owns the session, or possibly owns it. Close it."""

    def __init__(self):
        super().__init__("another process owns the session", _OWNED)


def _connect(conn, address, wait):
    """Connects. Another user can keep the keeper's listen queue full for a moment, so it
    retries.
    """
    end = time.monotonic() + wait
    while True:
        try:
            return conn.connect(address)
        except BlockingIOError:  # EAGAIN, even for a socket with a timeout
            if time.monotonic() >= end:
                raise
            time.sleep(0.002)


class _Message:
    def __init__(self, kind, session=0, number=0, read=0, written=0, name="", text="", state=b"", unread=b"", seq=0, flags=0):
        self.kind, self.session, self.number, self.read, self.written = kind, session, number, read, written
        self.name, self.text, self.state, self.unread, self.seq, self.flags = name, text, state, unread, seq, flags
        self.cut = False  # received without its descriptors, because this process has reached its limit


def _spill(data):
    """Returns a sealed memfd with data too large for a message."""
    fd = os.memfd_create("weir-handoff-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view):]
        seals = 1 | 2 | 4 | 8  # F_SEAL_SEAL, SHRINK, GROW, WRITE
        fcntl.fcntl(fd, 1033, seals)  # F_ADD_SEALS
    except OSError:
        os.close(fd)
        raise
    return fd


class _Timer:
    """A timerfd, readable periodically once set. Module os has them only since Python 3.13."""

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._close = weakref.finalize(self, os.close, self._fd)  # exactly once, with or without an explicit close
        self._close.atexit = False

    def fileno(self):
        return self._fd

    def set(self, seconds, at_once=False):
        if not self._close.alive:
            return
        every = int(seconds * 1e9)
        self._libc.timerfd_settime(self._fd, 0, struct.pack("llll", 0, every, 0, 1 if at_once else every), None)

    def read(self):
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            pass

    def close(self):
        self._close()


def _wait(file, event, timeout):
    """Reports whether file is ready for a poll event within timeout seconds; None: no
    limit. select.select would only support descriptors below 1024.
    """
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(None if timeout is None else max(0, math.ceil(timeout * 1000))))


def _inline(sock):
    """Makes an urgent byte (MSG_OOB) part of the stream. Otherwise the kernel would count
    it as received, but no read would return it. Connections inherit this option from
    their listener.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)


class Session:
    """A TCP connection. read and written are positions: bytes since its beginning."""

    def __init__(self, member, sock):
        self.member, self.socket = member, sock
        sock.setblocking(False)
        _inline(sock)
        self._peek_from(-1)  # a process may have been killed in _peek
        (self.id,) = struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))
        self.read, self.written = self._positions() or (0, 0)
        self.replay = 0  # bytes to be written again, already sent by the predecessor
        self.received = self.crashed = False
        self.state = None  # as committed; None for a new session
        self.moved = False  # owned by another process, or possibly: recv, send and commit raise Moved
        self._cut = False  # possibly: the keeper exited during the transfer
        self._committed = (self.read, self.written, b"")  # read, written and unread, for the next keeper
        self.error = None  # why the last commit is not kept: a HandoffError
        self._unread = b""  # read by the predecessor, not covered by its state
        self._seen = 0
        self._kept = 0
        self._has = 0  # size of state and unread at the keeper of _kept, as far as known

    def _positions(self):
        """Returns the positions from the kernel, None for a closed connection."""
        while True:
            a = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            queued = self._queued()
            unsent = struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, b"\0" * 4))[0]
            b = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            state = b[0]
            if state == 7 or len(b) < 136:
                return None
            if a[0] == state and a[120:] == b[120:]:  # tcpi_bytes_acked, tcpi_bytes_received
                break
        acked, received = struct.unpack_from("=QQ", b, 120)
        # A FIN has a sequence number but is not a byte.
        return received - queued - (state in (8, 9, 11)), acked + unsent - (state in (4, 5, 9, 11))

    def fileno(self):
        return self.socket.fileno()

    @property
    def pending(self):
        """Returns the number of bytes for recv that are not in the socket, so select does
        not show them. A received session may have such bytes until they are read. Serve
        each session returned by accept at once.
        """
        return len(self._unread)

    def _check(self):
        if self.moved:
            raise Moved()

    def recv(self, n):
        """Returns the bytes after the last commit and leaves them in the socket. Commit
        before the next call, or it returns the same bytes again. Raises BlockingIOError
        without data.
        """
        self._check()
        if self._unread:
            out, self._unread = self._unread[:n], self._unread[n:]
            return out
        out = self._peek(n)
        self._seen = len(out)
        return out

    def _queued(self):
        return struct.unpack("i", fcntl.ioctl(self.socket, termios.FIONREAD, b"\0" * 4))[0]

    def _at_mark(self):
        """Reports whether data begins at an urgent byte. A read there fails with EAGAIN if
        a signal is pending.
        """
        return self._queued() > 0 and any(fcntl.ioctl(self.socket, _SIOCATMARK, b"\0" * 4))

    def _peek_from(self, off):
        """Sets the offset of peeks from the beginning of the queue; -1: none. Returns False
        before Linux 6.9.
        """
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, off)
        except OSError:
            return False
        return True

    def _peek(self, n):
        """Returns the head of the receive queue. A peek stops at an urgent byte. Since
        Linux 6.9 another one can begin there. On older kernels the bytes before it must
        be committed first.
        """
        out = self._read(n, socket.MSG_PEEK)
        while 0 < len(out) < n and self._queued() > len(out) and self._peek_from(len(out)):
            try:
                more = self._read(n - len(out), socket.MSG_PEEK)
            except OSError:
                break  # the next call reports the error
            finally:
                self._peek_from(-1)
            if not more:
                break
            out += more
        return out

    def _read(self, n, flags=0):
        for _ in range(100):  # a kTLS socket always returns EAGAIN at an urgent byte
            try:
                return self.socket.recv(n, flags)
            except BlockingIOError:
                if not self._at_mark():
                    raise
        return self.socket.recv(n, flags)

    def send(self, data):
        """Is like socket.send. Bytes written by a predecessor after its last commit are not
        sent twice.
        """
        self._check()
        if self.replay:
            n = min(self.replay, len(data))
            self.replay -= n
        else:
            n = self.socket.send(data)
        self.written += n
        return n

    def sendall(self, data, timeout=None):
        """Sends all of data and waits for room."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.send(view):]
            except BlockingIOError:
                if not _wait(self, select.POLLOUT, timeout):
                    raise TimeoutError(errno.ETIMEDOUT, "the peer does not read") from None

    def commit(self, state, unparsed=b""):
        """Commits: state accounts for all bytes returned by recv and sent by send, except
        the last bytes received, unparsed. The caller keeps these. Returns True if a
        keeper has the commit. Otherwise error has the reason (code 7: over a limit). The
        session continues in any case, and the next accepted commit keeps it again. The
        next commit also reports a later rejection.
        """
        self._check()
        seen, self._seen = self._seen, 0
        self.read += seen
        self.state = bytes(state)
        self._committed = (self.read, self.written, bytes(unparsed) + self._unread)
        self.member._reconnect()
        try:
            self.member._keep(self)
            self.error = None
        except HandoffError as e:
            self.error = e
        self._check()  # during the reconnect another process may have claimed it
        # The keeper comes first, because bytes taken out of the socket are nowhere else.
        self._discard(seen)
        return self.error is None

    def _discard(self, n):
        while n:
            # recv with MSG_TRUNC would not copy, but Python would still allocate.
            got = len(self._read(n))
            if not got:
                raise HandoffError("another process has read from the session")
            n -= got

    def close(self):
        """Ends a session for good, or only this process's part of a moved one. After an
        interrupted transfer only a keeper knows the owner. Without a keeper, the next
        one is asked as soon as it starts.
        """
        if not self.moved:
            try:
                self._discard(self._seen)  # unread bytes would cause a reset
                self.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            self.member._drop(self)
        self.member._forget(self)
        if self.member._let_go(self):
            self.socket.close()
        else:
            self.member._over.append(self)


def _believable(uid, keeper):
    """Reports whether the keeper's user is root, this one, $WEIR_HANDOFF_UID, or the owner
    of the socket's directory. Anyone can bind an abstract name.
    """
    if uid in (0, os.geteuid()) or os.environ.get("WEIR_HANDOFF_UID") == str(uid):
        return True
    try:
        return not keeper.startswith("@") and os.stat(os.path.dirname(keeper) or ".").st_uid == uid
    except OSError:
        return False


class Member:
    """This process as a member of a service. Raises HandoffError if that is not allowed.

    With move set, sessions move on request (weir handoff send, a change of steering).
    accept calls move(id, to) with the number of a session (0: all) and the name of a member
    ("": any). The function then calls transfer. On failure the session stays. When a newer
    process of this name is ready, accept calls move with 0 and that name, and again for
    returned sessions. proof is the required life of that process in seconds before this one
    counts as replaced.
    """

    def __init__(self, service, name, keeper=None, move=None, proof=1.0):
        self.service, self.name = service, name
        self.keeper = keeper or os.environ.get("WEIR_HANDOFF_SOCKET") or DEFAULT_SOCKET
        self.listener, self._listener_id, self._label = None, 0, ""
        self.replaced = False  # a newer process of this name has proved itself
        self._proof = proof
        self._standby = False  # the keeper supports members on standby
        self._proving = False  # a newer process is ready but not proved yet: accept nothing
        self._proof_end = self._again = self._pause = 0.0  # end of its proof; the next attempt to hand over; until the one after
        self._conn, self._generation, self._seq, self._retry = None, 0, 0, 0.0
        self._woken = False  # a message for accept was already read from _conn
        self._broken = False  # the keeper has exited: _conn still has unread messages
        self._greeting, self._greet_by = None, 0.0  # a connection waiting for the answer to Hello
        self._given = collections.deque()
        self._move, self._orders = move, collections.deque()
        self._sessions = weakref.WeakValueDictionary()  # by number, until they are closed or transferred
        self._over = []  # closed sessions to ask the next keeper about: _let_go
        self._refused = set()  # sessions rejected by the keeper: their next commit waits for the answer
        self._ready = False
        self._epoll = select.epoll()
        try:
            self._timer = _Timer()  # wakes the caller without a keeper
            self._epoll.register(self._timer, select.EPOLLIN)
            self._hello(_TIMEOUT)
            if not self._welcome(_TIMEOUT):
                raise HandoffError("the keeper does not answer")
        except BaseException:
            if hasattr(self, "_timer"):
                self._lost()
                self._timer.close()
            self._epoll.close()
            raise

    # The connection to the keeper.

    def _hello(self, wait=0.0):
        """Connects within wait seconds and sends Hello. _welcome handles the answer."""
        conn = None
        try:
            conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            conn.settimeout(wait)
            _connect(conn, "\0" + self.keeper[1:] if self.keeper.startswith("@") else self.keeper, wait)
        except OSError as e:
            if conn:
                conn.close()
            self._lost()
            if isinstance(e, (ConnectionRefusedError, FileNotFoundError)):
                self._release()  # no other owner can exist
            raise HandoffError(f"no keeper answers on {self.keeper}: {e}") from e
        uid = struct.unpack("iII", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if not _believable(uid, self.keeper):
            conn.close()
            self._lost()
            raise HandoffError(
                f"{self.keeper}: user {uid} answers there, neither root nor this user:"
                " set $WEIR_HANDOFF_UID to its number if that is right"
            )
        conn.setblocking(False)
        self._conn = conn
        self._seq = self._seq % 0xFFFFFFFF + 1
        try:
            self._send(_Message(_HELLO, number=_EXACT | _STANDBY | (_MOVES if self._move else 0), name=self.name, text=self.service, seq=self._seq))
        except HandoffError:
            self._lost()
            raise
        self._conn, self._greeting, self._greet_by = None, conn, time.monotonic() + _TIMEOUT
        self._epoll.register(conn, select.EPOLLIN)

    def _welcome(self, wait=0.0):
        """Waits for the answer to Hello and gives the keeper all sockets. Returns False
        without an answer yet.
        """
        conn = self._conn = self._greeting
        self._greeting = None
        got = self._receive(wait)
        if got is None:
            self._conn, self._greeting = None, conn  # a hanging keeper: do not wait for it
            return False
        if got[0].kind != _WELCOME:
            self._lost()
            raise HandoffError(got[0].text, got[0].number)
        self.max_state = got[0].read
        self._standby = bool(got[0].number & _STANDBY)
        self._generation += 1
        self._tick()
        if self._ready:
            self._announce()
        return True

    def _announce(self):
        self._keep_listener()
        for s in list(self._sessions.values()):
            if s._kept != self._generation and not s.moved:
                try:
                    self._refused.discard(s.id)
                    self._keep(s)
                except HandoffError as e:
                    s.error = e
                while self._conn and (got := self._receive(0)):
                    self._heard(*got)
        while self._over:
            if not self._let_go(self._over[-1]):
                raise HandoffError(f"no keeper answers on {self.keeper}")
            self._over.pop().socket.close()
        # The answer follows all errors about sessions.
        self._call(_Message(_READY, number=self._readiness()))

    def _keep_listener(self):
        if self.listener and not self._proving and not self.replaced:  # else it belongs to the newer process
            self._send(_Message(_KEEP, session=self._listener_id, number=_LISTENER, text=self._label), [self.listener.fileno()])

    def _serves(self):
        """Reports whether the caller has a session of its own."""
        return any(not s.moved for s in self._sessions.values())

    def _readiness(self):
        """Returns the number of a Ready message. A replaced member has sessions to hand
        over and gets none.
        """
        yes = 1 | (_READY_MOVES if self._move else 0)
        if self._proving or self.replaced and self._serves():
            return yes | _READY_STANDBY if self._standby else 0
        return 0 if self.replaced else yes

    def _stand_by(self):
        """Handles a newer process being ready. This one stands by: it accepts nothing,
        hands its sessions over, and serves returned sessions. That ends when the other
        has proved itself, dies or hangs: see _prove.
        """
        if self.replaced:
            return
        if not self._proving and self.listener:
            self._epoll.unregister(self.listener)
        if not self._standby:
            self.replaced = True
            return
        self._again = time.monotonic()
        self._proof_end, self._pause = self._again + self._proof, _TRY
        if not self._proving:  # else an even newer one
            self._proving = True
            self._answer(_Message(_READY, number=self._readiness()))

    def _go_on(self):
        """Handles the report that no newer process answers any more."""
        if not self._proving:
            return
        self._proving = False
        if self.listener:
            self._epoll.register(self.listener, select.EPOLLIN)
            try:
                self._keep_listener()  # this keeper may not have it
            except HandoffError:
                pass  # the next one gets it

    def _prove(self):
        """Does the work of a member on standby: hands sessions over and checks the newer
        process's proof. The keeper decides about the proof. replaced is set when all
        sessions are with the newer process or have ended. Without move the caller hands
        the sessions over afterwards.
        """
        self._timer.read()
        if self._move and time.monotonic() >= self._again and self._serves():
            self._again, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _TRY_LAST)
            self._move(0, self.name)
        if not self._proving or not self._conn or self._given:
            return
        if not self._standby:  # an older keeper has started meanwhile
            self._proving, self.replaced = False, True
            return
        if time.monotonic() < self._proof_end or self._move and self._serves():
            return
        try:
            answer, _ = self._call(_Message(_READY, number=_READY_ENDS))
        except HandoffError:
            return  # it has exited; reconnecting
        if answer.number or not self._proving:
            return
        if self._serves():  # a session has come back or is still here
            self._answer(_Message(_READY, number=self._readiness()))
            if self._move:
                return
        self._proving, self.replaced = False, True

    def _lost(self):
        for conn in (self._conn, self._greeting):
            if conn:
                conn.close()
        self._conn, self._greeting, self._broken = None, None, False
        self._retry = time.monotonic() + _RETRY
        self._tick()

    def _tick(self):
        """Makes fileno() readable periodically without a keeper or on standby, and once if
        _woken is set.
        """
        self._timer.set(_RETRY if not self._conn else _LOOK if self._proving else 0, self._woken)

    def _reconnect(self, wait=0.0):
        """Reconnects to a keeper at intervals. With wait it tries now and waits so many
        seconds for an answer. A keeper that answers gets all sockets.
        """
        if self._broken:
            self._hear()
        if self._conn:
            return
        self._timer.read()
        if not wait and not self._greeting and time.monotonic() < self._retry:
            return
        try:
            if not self._greeting:
                self._hello()
            if not self._welcome(wait) and time.monotonic() >= self._greet_by:
                self._lost()
        except HandoffError:
            pass

    def _send(self, m, fds=()):
        if self._conn is None:
            raise HandoffError(f"no keeper answers on {self.keeper}")
        name, text, flags, fds, large = m.name.encode(), m.text.encode(), m.flags, list(fds), -1
        body = name + text
        if len(m.state) + len(m.unread) > _INLINE:
            try:
                large = _spill(m.state + m.unread)
            except OSError as e:
                raise HandoffError(f"store {len(m.state)} bytes of state in a memfd: {e}") from e
            fds.append(large)
            flags |= _STATE_FD
        else:
            body += m.state + m.unread
        head = _HEADER.pack(_VERSION, m.kind, flags, m.seq, m.session, m.read & _MASK, m.written & _MASK, m.number, len(name), 0, len(text), len(m.state), len(m.unread))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        end = time.monotonic() + _PATIENCE
        try:
            while True:
                try:
                    self._conn.sendmsg([head, body], rights, socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    if not _wait(self._conn, select.POLLOUT, end - time.monotonic()):
                        raise TimeoutError(errno.ETIMEDOUT, "it does not read") from None
        except OSError as e:
            if isinstance(e, (BrokenPipeError, ConnectionResetError)):
                self._broken = True  # a session given in it is in _conn and nowhere else
            else:
                self._lost()
            raise HandoffError(f"the keeper has exited: {e}") from e
        finally:
            if large >= 0:
                os.close(large)

    def _receive(self, timeout):
        """Returns the next message and its descriptors, None after timeout."""
        if self._conn is None:
            raise HandoffError(f"no keeper answers on {self.keeper}")
        if not _wait(self._conn, select.POLLIN, timeout):
            return None
        while True:
            try:
                data, control, flags, _ = self._conn.recvmsg(_HEADER.size + 63 + 1024 + _INLINE, socket.CMSG_SPACE(8), socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                continue  # it exited with unread data: reported once, before its messages
            except OSError:
                data, control, flags = b"", [], 0
            break
        fds = array.array("i")
        for level, kind, value in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(value[:len(value) - len(value) % fds.itemsize])
        fds = list(fds)
        # Fewer descriptors than expected: the message is complete and can be rejected.
        cut = bool(flags & socket.MSG_CTRUNC) and len(fds) < 2
        try:
            if len(data) < _HEADER.size or data[0] != _VERSION or flags & socket.MSG_TRUNC or flags & socket.MSG_CTRUNC and not cut:
                raise HandoffError(f"the keeper on {self.keeper} has exited")
            _, kind, flags, seq, session, read, written, number, name, _, text, state, unread = _HEADER.unpack_from(data)
            # Positions are modulo 2^64. Those before a session's arrival on this server are below
            # 0.
            read, written = (p - (1 << 64) if p >> 63 else p for p in (read, written))
            at = _HEADER.size
            m = _Message(kind, session, number, read, written, data[at:at + name].decode(), data[at + name:at + name + text].decode(), seq=seq, flags=flags)
            m.cut = cut
            if cut:  # it is unknown which one is missing
                for fd in fds:
                    os.close(fd)
                return m, []
            both = data[at + name + text:]
            if flags & _STATE_FD:
                large = fds.pop()
                both = os.pread(large, state + unread, 0)
                while 0 < len(both) < state + unread and (more := os.pread(large, state + unread - len(both), len(both))):
                    both += more
                os.close(large)
            if len(both) != state + unread:
                raise HandoffError("message length does not match its header")
        except (HandoffError, UnicodeDecodeError, IndexError) as e:
            for fd in fds:
                os.close(fd)
            self._lost()
            raise HandoffError(str(e)) from e
        m.state, m.unread = both[:state], both[state:]
        return m, fds

    def _call(self, m, fds=()):
        """Sends a request and returns the answer with its descriptors."""
        self._ask(m, fds)
        return self._answered(m)

    def _ask(self, m, fds=()):
        self._seq = self._seq % 0xFFFFFFFF + 1
        m.seq = self._seq
        self._send(m, fds)

    def _answered(self, m):
        while True:
            got = self._receive(_TIMEOUT)
            if got is None:
                self._lost()
                raise HandoffError("the keeper does not answer")
            answer, received = got
            if answer.seq != m.seq:
                self._heard(answer, received)
            elif answer.cut:  # an answer to Find: the socket stays for the predecessor or the next process
                self._heard(answer, received)
                raise HandoffError(_NO_DESCRIPTORS)
            elif answer.kind == _ERROR:
                raise HandoffError(answer.text, answer.number)
            else:
                return answer, received

    def _hear(self):
        """Handles the received messages."""
        try:
            while self._conn and (got := self._receive(0)):
                self._heard(*got)
        except HandoffError:
            pass  # it has exited; reconnecting

    def _heard(self, m, fds):
        """Handles a message that is not an answer."""
        if m.kind == _GIVE and m.number == _STREAM and fds:
            self._take(m, socket.socket(fileno=fds.pop(0)))
        elif m.kind == _GIVE and m.number == _LISTENER and m.session == self._listener_id and not self.replaced:
            # Our listener comes back from a newer process that died before it was ready.
            self._answer(_Message(_TOOK, session=m.session))
        elif m.kind == _GIVE:
            why = _NO_DESCRIPTORS if m.cut else f"no socket for {m.text!r} here"
            self._answer(_Message(_REFUSE, session=m.session, number=_LOST, text=why))
        elif m.kind == _ERROR:
            s = self._sessions.get(m.session)
            if s and m.number == _OWNED:
                s.moved, s._cut = True, False  # another process claimed it first at this keeper
            elif s:
                self._refused.add(m.session)
                s._has = 0
        elif m.kind == _LIMITS:
            self.max_state = m.read
            self._answer(_Message(_AGREE, number=m.number))  # all later messages obey the new limits
        elif m.kind == _MOVE and self._move:
            self._orders.append((m.session, m.name))  # the caller may be using the session
        elif m.kind == _REPLACED:
            self._stand_by()
        elif m.kind == _ALONE:
            self._go_on()
        if m.kind in (_GIVE, _MOVE, _REPLACED, _ALONE):
            # This may happen during a commit or a transfer. A poll of _conn no longer shows the
            # message.
            self._woken = True
            self._tick()
        for fd in fds:
            os.close(fd)

    def _answer(self, m):
        try:
            self._send(m)
        except HandoffError:
            pass  # it has exited; reconnecting

    def _take(self, m, sock):
        for s in [*self._sessions.values(), *self._over]:
            if s.id == m.session:
                s._cut = False  # it had moved and now comes back from its new owner
        try:
            s = Session(self, sock)
            at, put = s._positions() or (m.read, m.written)
            if at > m.read or put < m.written:
                raise HandoffError("bytes are missing")
            s._discard(m.read - at)
        except OSError as e:  # also ConnectionResetError: the peer has closed
            self._answer(_Message(_REFUSE, session=m.session, number=_LOST, text=str(e)))
            sock.close()
            return
        s.read, s.written, s.replay = m.read, m.written, put - m.written
        s.received, s.crashed = True, bool(m.flags & _CRASHED)
        s.state, s._unread, s._kept = m.state, m.unread, self._generation
        s._committed = (m.read, m.written, m.unread)
        s._has = len(m.state) + len(m.unread)
        self._sessions[s.id] = s
        self._given.append(s)
        self._answer(_Message(_TOOK, session=m.session))

    def _fits(self, s, size):
        """Reports whether the keeper accepts the size of a session. A size it already has
        from a time with a larger limit is fine, too.
        """
        return size <= self.max_state or s._kept == self._generation and size <= s._has

    def _keep(self, s):
        """Stores a commit at the keeper. Raises HandoffError on failure."""
        read, written, unread = s._committed
        m = _Message(_COMMIT, session=s.id, read=read, written=written, state=s.state or b"", unread=unread)
        size, fds = len(m.state) + len(unread), []
        if self._conn and not self._fits(s, size):
            self._hear()  # it may have raised its limit
            s._check()
        refused = s.id in self._refused
        if self._conn and not self._fits(s, size):
            self._refused.add(s.id)
            raise HandoffError(f"{size} bytes of state and unread; this keeper keeps at most {self.max_state}", _LIMIT)
        if refused or s._kept != self._generation:  # a new session, or a new keeper
            m.kind, m.number, m.text, fds = _KEEP, _STREAM, self._label, [s.fileno()]
        s._kept, s._has = self._generation, size
        if refused:  # the caller gets the result at once
            try:
                self._call(m, fds)
            except HandoffError as e:
                s.moved, s._has = e.code == _OWNED, 0
                raise
            self._refused.discard(s.id)
        else:
            self._send(m, fds)

    def _forget(self, s):
        self._refused.discard(s.id)
        if self._sessions.get(s.id) is s:
            del self._sessions[s.id]

    def _let_go(self, s):
        """Makes the keeper release a session after an interrupted transfer. If another
        process owns it, the keeper refuses. If the keeper had rejected the transfer,
        this process would otherwise own the session for its whole life, and nobody would
        serve it. Only the keeper's duplicate is closed. A session given to another
        process by an earlier keeper continues. Returns False without a keeper. The next
        keeper is asked then.
        """
        if s._cut:
            s._kept = 0
            self._refused.discard(s.id)
            try:
                self._keep(s)
                self._send(_Message(_DROP, session=s.id))
            except HandoffError as e:
                if e.code != _LIMIT:  # a session over the limit is not kept either
                    return False
            self._refused.discard(s.id)
            s._cut = False
        return True

    def _release(self):
        for s in self._over:
            s.socket.close()
        self._over.clear()

    def _drop(self, s):
        if self._conn and s._kept == self._generation:
            try:
                self._send(_Message(_DROP, session=s.id))
            except HandoffError:
                pass

    # The public methods.

    def listen(self, host, port, backlog=128):
        """Listens, or continues with the listener of the predecessor of this name. Then
        this member is ready, and an older one of its name is told that it is replaced.
        """
        self._label = f"tcp {host}:{port}"
        try:
            answer, fds = self._call(_Message(_FIND, number=_LISTENER, text=self._label))
            self.listener = socket.socket(fileno=fds[0])
            self._send(_Message(_TOOK, session=answer.session))
        except HandoffError as e:
            if e.code == 0:
                raise
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.listener = socket.create_server((host, port), family=family, backlog=backlog)
        self.listener.setblocking(False)
        _inline(self.listener)
        (self._listener_id,) = struct.unpack("=Q", self.listener.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))
        self._epoll.register(self.listener, select.EPOLLIN)
        self.ready()
        return self.listener

    def ready(self):
        """Accepts sessions of other members, also without a listener."""
        self._ready = True
        self._announce()

    def fileno(self):
        """Returns a descriptor, readable when accept has work to do."""
        return self._epoll.fileno()

    def accept(self, timeout=None):
        """Returns a session, new or from another member, or None after timeout seconds.
        Raises Replaced when a newer process of this name has proved itself. With move
        set it also has all sessions not ended here. Otherwise the caller transfers them
        now, and the next call returns each rejected one. Raises the OSError of
        accept(2). For those in SHORT the connection still waits, and fileno() stays
        readable.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._hear()
            if self._given:
                return self._given.popleft()
            while self._orders:  # the caller now has all earlier sessions
                self._move(*self._orders.popleft())
            if self._given:  # meanwhile
                continue
            if self._woken:
                self._woken = False
                self._tick()
            if self._proving:
                self._prove()
                if self._given or self._woken:
                    continue
            if self.replaced:
                self._reconnect()  # the next keeper needs sessions not yet handed over, too
                raise Replaced(f"a newer {self.name} of {self.service} is ready")
            if self.listener and not self._proving:
                try:
                    s = Session(self, self.listener.accept()[0])
                    self._sessions[s.id] = s
                    try:
                        self._keep(s)
                    except HandoffError as e:
                        s.error = e
                    return s
                except (BlockingIOError, ConnectionAbortedError):
                    pass
                except OSError as e:
                    # accept(2) allocates the descriptor first, so perhaps no connection waits.
                    if e.errno not in SHORT or _wait(self.listener, select.POLLIN, 0):
                        raise
            self._reconnect()
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._epoll.poll(left)

    def transfer(self, session, to, state, unparsed=b""):
        """Transfers a session to a member by name ("": the ready member with the fewest
        sessions). On HandoffError it stays here, with one exception: session.moved is
        set if the keeper exited meanwhile. The other member may own it then, so only
        close it. A new keeper first gets the session itself.
        """
        self._hear()  # may find that the keeper has exited
        self._reconnect(_PATIENCE)
        session._check()
        m = _Message(_TRANSFER, session=session.id, name=to, read=session.read + session._seen, written=session.written,
                     state=bytes(state), unread=bytes(unparsed) + session._unread)
        self._ask(m)
        try:
            self._answered(m)
        except HandoffError as e:
            session._cut = self._conn is None
            session.moved = session._cut or e.code == _OWNED
            raise
        except BaseException:  # from a signal handler: the owner is unknown now
            self._lost()
            session.moved = session._cut = True
            raise
        self._forget(session)
        session.socket.close()

    def forget(self):
        """Is close for a service that ends for good. The keeper also releases the listener,
        so its port is free at once. Open sessions end. To keep them, transfer them
        first.
        """
        for s in [*self._given, *self._sessions.values()]:
            s.close()
        if self.listener and not self._proving and not self.replaced:
            self._answer(_Message(_DROP, session=self._listener_id))
        self._given.clear()
        self.close()

    def close(self):
        """Leaves the service. Open sessions and the listener are for the next process."""
        try:
            self._send(_Message(_LEAVE))
        except HandoffError:
            pass
        while self._given:
            self._given.popleft().socket.close()
        self._release()
        self._lost()
        if self.listener:
            self.listener.close()
        self._timer.close()
        self._epoll.close()

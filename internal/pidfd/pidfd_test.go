// SPDX-License-Identifier: Apache-2.0

package pidfd_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"sockets": sockets, "refused": refused})
	os.Exit(m.Run())
}

// sockets listens on a TCP port, with a second descriptor for it, and on a UDP port. It prints
// their descriptors and ends with its standard input.
func sockets([]string) error {
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	check(err)
	udp, err := net.ListenPacket("udp4", "127.0.0.1:0")
	check(err)
	second, err := tcp.(*net.TCPListener).File()
	check(err)
	fmt.Println(fdOf(tcp.(*net.TCPListener)), second.Fd(), fdOf(udp.(*net.UDPConn)))
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(1)
	}
}

func fdOf(c syscall.Conn) (fd uintptr) {
	raw, err := c.SyscallConn()
	check(err)
	check(raw.Control(func(f uintptr) { fd = f }))
	return fd
}

type testChild struct {
	*nstest.Process
	tcp, second, udp int // descriptors
}

func start(t *testing.T) *testChild {
	t.Helper()
	c := &testChild{Process: nstest.Start(t, nstest.Child("sockets"))}
	line, _ := c.Line()
	if _, err := fmt.Sscan(line, &c.tcp, &c.second, &c.udp); err != nil {
		t.Fatal(err)
	}
	return c
}

func open(t *testing.T, pid int) *pidfd.Process {
	t.Helper()
	p, err := pidfd.Open(pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// awaitZombie waits for the process to exit without reaping it.
func awaitZombie(t *testing.T, p *pidfd.Process) {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(p.FD()), Events: unix.POLLIN}}
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		n, err := unix.Poll(fds, 1000)
		if n == 1 {
			return
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
	}
	t.Fatal("the child did not end")
}

func TestLife(t *testing.T) {
	c := start(t)
	p := open(t, c.PID())
	if p.PID() != c.PID() || !p.Alive() {
		t.Fatalf("PID() = %d, Alive() = %v; want %d, true", p.PID(), p.Alive(), c.PID())
	}
	running, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	if running.PPID != os.Getpid() || running.UID != uint32(os.Geteuid()) || strings.IndexByte("RSD", running.State) < 0 || running.StartTime == 0 {
		t.Errorf("running: %+v", running)
	}

	c.CloseInput()
	awaitZombie(t, p)
	if p.Alive() {
		t.Error("a zombie counts as alive")
	}
	zombie, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	if zombie.State != 'Z' || zombie.StartTime != running.StartTime || zombie.Comm != running.Comm {
		t.Errorf("zombie: %+v, was %+v", zombie, running)
	}
	if s, err := pidfd.StartTime(c.PID()); err != nil || s != running.StartTime {
		t.Errorf("StartTime = %d, %v; want %d", s, err, running.StartTime)
	}
	if q := open(t, c.PID()); q.Alive() {
		t.Error("a zombie opened late counts as alive")
	}
	_, err = p.Sockets()
	wantGone(t, "Sockets of a zombie", err)
	_, err = p.Dup(c.tcp)
	wantGone(t, "Dup from a zombie", err)

	if err := c.Wait(); err != nil {
		t.Fatal(err)
	}
	if p.Alive() {
		t.Error("alive after it was reaped")
	}
	_, err = p.Info()
	wantGone(t, "Info", err)
	_, err = p.Sockets()
	wantGone(t, "Sockets", err)
	_, err = pidfd.StartTime(c.PID())
	wantGone(t, "StartTime", err)
	_, err = pidfd.Open(c.PID())
	wantGone(t, "Open", err)
}

func wantGone(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, pidfd.ErrGone) {
		t.Errorf("%s: %v, want ErrGone", what, err)
	}
}

func TestSocketsAndDup(t *testing.T) {
	c := start(t)
	p := open(t, c.PID())
	sockets, err := p.Sockets()
	if err != nil {
		t.Fatal(err)
	}
	inode := map[int]uint32{} // by descriptor
	for ino, fds := range sockets {
		for _, fd := range fds {
			inode[fd] = ino
		}
	}
	if inode[c.tcp] == 0 || inode[c.tcp] != inode[c.second] || inode[c.udp] == 0 || inode[c.udp] == inode[c.tcp] {
		t.Fatalf("sockets %v; want %d and %d as one, %d as another", sockets, c.tcp, c.second, c.udp)
	}

	dup, err := p.Dup(c.tcp)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(dup)
	var st unix.Stat_t
	if err := unix.Fstat(dup, &st); err != nil || uint32(st.Ino) != inode[c.tcp] {
		t.Errorf("the duplicate has inode %d, %v; want %d", st.Ino, err, inode[c.tcp])
	}
	if flags, err := unix.FcntlInt(uintptr(dup), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, %v; want close-on-exec", flags, err)
	}
	if v, err := unix.GetsockoptInt(dup, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || v != 1 {
		t.Errorf("SO_ACCEPTCONN = %d, %v; want the child's listener", v, err)
	}
	if _, err := p.Dup(1 << 20); !errors.Is(err, unix.EBADF) {
		t.Errorf("Dup of no descriptor: %v, want EBADF", err)
	}
}

// TestDupRefused checks the error for a user without privileges. The process belongs to root.
func TestDupRefused(t *testing.T) {
	nstest.NeedRoot(t)
	c := start(t)
	asker := nstest.Child("refused", c.PID(), c.tcp)
	asker.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
	other := nstest.Start(t, asker)
	for _, what := range []string{"Dup", "Sockets"} {
		if line, _ := other.Line(); !strings.HasPrefix(line, "true ") || !strings.Contains(line, "CAP_SYS_PTRACE") {
			t.Errorf("%s: %s; want a permission error with CAP_SYS_PTRACE", what, line)
		}
	}
}

// refused queries another user's process.
func refused(args []string) error {
	var pid, fd int
	if _, err := fmt.Sscan(strings.Join(args, " "), &pid, &fd); err != nil {
		return err
	}
	p, err := pidfd.Open(pid)
	if err != nil {
		return err
	}
	defer p.Close()
	_, err = p.Dup(fd)
	fmt.Println(errors.Is(err, os.ErrPermission), err)
	_, err = p.Sockets()
	fmt.Println(errors.Is(err, os.ErrPermission), err)
	return nil
}

func TestOpenErrors(t *testing.T) {
	for _, pid := range []int{0, -1} {
		if _, err := pidfd.Open(pid); err == nil || errors.Is(err, pidfd.ErrGone) {
			t.Errorf("Open(%d): %v, want an error about the number", pid, err)
		}
	}
	_, err := pidfd.Open(1<<22 + 1) // above the largest pid
	wantGone(t, "Open", err)
	_, err = pidfd.StartTime(1<<22 + 1)
	wantGone(t, "StartTime", err)
	thread := otherThread(t)
	if _, err := pidfd.Open(thread); err == nil || !strings.Contains(err.Error(), "that is a thread") {
		t.Errorf("Open(%d), a thread: %v", thread, err)
	}
}

// otherThread returns a thread of this process other than the main one.
func otherThread(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range tasks {
		var tid int
		if _, err := fmt.Sscan(e.Name(), &tid); err == nil && tid != os.Getpid() {
			return tid
		}
	}
	t.Fatal("this process has one thread only")
	return 0
}

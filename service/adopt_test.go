// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/units"
)

var both = []string{"udp 0.0.0.0:4739", "tcp 0.0.0.0:1790"}

func pids(ds ...*daemon) []int {
	var out []int
	for _, d := range ds {
		out = append(out, d.pid())
	}
	return out
}

func TestAdopt(t *testing.T) {
	d := start(t, "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1790", "udp4 0.0.0.0:9", "tcp4 127.0.0.1:10")
	group := cgroup(t)
	d.moveTo(t, group)
	defer d.end() // before its cgroup is removed
	for name, m := range map[string]Member{
		"pid":     {PID: d.pid()},
		"pidfile": {PIDFile: pidFile(t, fmt.Sprintf("%d\n", d.pid()))},
		"cgroup":  {Cgroup: group},
	} {
		t.Run(name, func(t *testing.T) {
			a := adopt(t, m, both...)
			if got := a.PIDs(); !slices.Equal(got, pids(d)) {
				t.Errorf("processes %v, want %d", got, d.pid())
			}
			fds := []int{a.Sockets[0].FD, a.Sockets[1].FD}
			a.Close()
			for _, fd := range fds {
				if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
					t.Errorf("descriptor %d after Close: %v", fd, err)
				}
			}
		})
	}
	// The duplicates are the daemon's own sockets: an option set here applies there.
	a := adopt(t, Member{PID: d.pid()}, both...)
	if err := unix.SetsockoptInt(a.Sockets[0].FD, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<20); err != nil {
		t.Fatal(err)
	}
	again := adopt(t, Member{PID: d.pid()}, both...)
	if got := again.Sockets[0].Socket.Mem.RcvBuf; got != 2<<20 {
		t.Errorf("receive buffer of %d bytes, want %d", got, 2<<20)
	}
}

func TestAdoptChoosesItsOwn(t *testing.T) {
	var all []*daemon
	for range 3 {
		all = append(all, start(t, "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1790"))
	}
	seen := map[uint64]int{}
	for _, d := range all {
		for _, s := range adopt(t, Member{PID: d.pid()}, both...).Sockets {
			if other := seen[s.Socket.Cookie]; other != 0 {
				t.Errorf("%d and %d got the same socket", other, d.pid())
			}
			seen[s.Socket.Cookie] = d.pid()
		}
	}
}

func TestAdoptFamilies(t *testing.T) {
	listens := []string{"udp [::]:4739", "tcp [::]:1790"}
	t.Run("dual stack", func(t *testing.T) {
		d := start(t, "udp [::]:4739", "tcp [::]:1790")
		a := adopt(t, Member{PID: d.pid()}, listens...)
		if a.Sockets[0].FD != a.Sockets[1].FD || a.Sockets[2].FD != a.Sockets[3].FD || a.Sockets[0].FD == a.Sockets[2].FD {
			t.Errorf("four endpoints of two sockets have descriptors %d %d %d %d", a.Sockets[0].FD, a.Sockets[1].FD, a.Sockets[2].FD, a.Sockets[3].FD)
		}
	})
	t.Run("one each", func(t *testing.T) {
		d := start(t, "udp4 0.0.0.0:4739", "udp6 [::]:4739", "tcp4 0.0.0.0:1790", "tcp6 [::]:1790")
		a := adopt(t, Member{PID: d.pid()}, listens...)
		for i, want := range []uint8{unix.AF_INET, unix.AF_INET6, unix.AF_INET, unix.AF_INET6} {
			if got := a.Sockets[i].Socket.Family; got != want {
				t.Errorf("%s got a socket of family %d, want %d", a.Sockets[i].Endpoint, got, want)
			}
		}
	})
	t.Run("v6only", func(t *testing.T) {
		d := start(t, "udp6 [::]:4739", "tcp6 [::]:1790")
		refuse(t, Member{PID: d.pid()}, ErrNoSocket, "socket missing: udp4 :4739, tcp4 :1790", listens...)
		adopt(t, Member{PID: d.pid()}, "udp6 :4739", "tcp6 :1790")
	})
	t.Run("dual stack for IPv4 alone", func(t *testing.T) {
		d := start(t, "udp [::]:4739", "tcp [::]:1790")
		adopt(t, Member{PID: d.pid()}, both...)
	})
	t.Run("address", func(t *testing.T) {
		d := start(t, "udp4 127.0.0.2:4739", "udp4 0.0.0.0:4739")
		a := adopt(t, Member{PID: d.pid()}, "udp 127.0.0.2:4739")
		if got := a.Sockets[0].Socket.Local.Addr().String(); got != "127.0.0.2" {
			t.Errorf("adopted the socket of %s", got)
		}
		refuse(t, Member{PID: start(t, "udp4 127.0.0.3:4739").pid()}, ErrNoSocket, "udp 127.0.0.2:4739", "udp 127.0.0.2:4739")
	})
}

func TestAdoptBound(t *testing.T) {
	d := start(t, "udp4 127.0.0.1:7001", "udp4 0.0.0.0:7001", "tcp4 0.0.0.0:7002")
	m := bound(t, Member{PID: d.pid()}, "udp 127.0.0.1:7001", "tcp :7002")
	a := adopt(t, m, both...)
	if got := a.Sockets[0].Socket.Local.String(); got != "127.0.0.1:7001" {
		t.Errorf("adopted %s, want 127.0.0.1:7001", got)
	}
	if got := a.Sockets[1].Socket.Local.Port(); got != 7002 {
		t.Errorf("adopted port %d, want 7002", got)
	}
	refuse(t, Member{PID: d.pid()}, ErrNoSocket, "udp4 :4739, tcp4 :1790", both...)
	refuse(t, bound(t, Member{PID: d.pid()}, "udp 127.0.0.1:7001", "tcp :7003"), ErrNoSocket, "socket missing: tcp4 :7003", both...)
	for _, wrong := range []Member{bound(t, Member{PID: d.pid()}, "udp :7001"), bound(t, Member{PID: d.pid()}, "tcp :7002", "udp :7001")} {
		if _, err := wrong.Adopt(t.Context(), here(t), spec(t, both)); err == nil || !strings.Contains(err.Error(), "bound") {
			t.Errorf("bound to %v: %v", wrong.Bound, err)
		}
	}
}

// The sockets of a master's workers are not the master's (haproxy -W): the error names the worker. This process is the
// master.
func TestAdoptMaster(t *testing.T) {
	nstest.NeedRoot(t)
	master := Member{PID: os.Getpid()}
	start(t, "udp4 0.0.0.0:4740") // another worker
	if _, err := master.Adopt(t.Context(), here(t), spec(t, both)); err == nil || strings.Contains(err.Error(), "started") {
		t.Errorf("no process has it: %v", err)
	}
	if len(children(os.Getpid())) == 0 {
		t.Skip("need: kernel with CONFIG_PROC_CHILDREN")
	}
	worker := start(t, "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1790")
	refuse(t, master, ErrNoSocket, fmt.Sprintf("its child process %d has the socket: name their unit or cgroup", worker.pid()), both...)
	adopt(t, Member{PID: worker.pid()}, both...)
}

func TestAdoptMissing(t *testing.T) {
	refuse(t, Member{User: "nosuchuser"}, ErrNotRunning, "/etc/passwd has no user nosuchuser", both...)
	refuse(t, Member{User: "0"}, ErrNotRunning, "no process of user 0 has registered itself", both...)
	d := start(t, "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1791")
	want := fmt.Sprintf("process %d: socket missing: tcp4 :1790", d.pid())
	refuse(t, Member{PID: d.pid()}, ErrNoSocket, want, both...)
	// A foreign process has the other one.
	start(t, "tcp4 0.0.0.0:1790")
	refuse(t, Member{PID: d.pid()}, ErrNoSocket, want, both...)
	// The kernel delivers only the peer's packets to a connected socket.
	c := start(t, "connected 127.0.0.1:4740")
	refuse(t, Member{PID: c.pid()}, ErrNoSocket, "udp4 :4740", "udp 0.0.0.0:4740")
}

func TestAdoptAmbiguous(t *testing.T) {
	d := start(t, "udp4 0.0.0.0:4739", "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1790")
	refuse(t, Member{PID: d.pid()}, ErrAmbiguous, "udp4 :4739: the member has 2 sockets there; a slot takes one", both...)
}

// A daemon of two processes, and pre-forked workers with all sockets each.
func TestAdoptCgroupOfSeveral(t *testing.T) {
	t.Run("split", func(t *testing.T) {
		udp, tcp := start(t, "udp4 0.0.0.0:4739"), start(t, "tcp4 0.0.0.0:1790")
		group := cgroup(t)
		defer udp.end()
		defer tcp.end()
		tcp.moveTo(t, group)
		refuse(t, Member{Cgroup: group}, ErrNoSocket, "udp4 :4739", both...)
		udp.moveTo(t, group)
		a := adopt(t, Member{Cgroup: group}, both...)
		if got := a.PIDs(); !slices.Equal(got, pids(udp, tcp)) {
			t.Errorf("processes %v, want %v", got, pids(udp, tcp))
		}
		tcp.end()
		if a.Alive() {
			t.Error("one of two processes has ended, and the member is taken to be alive")
		}
	})
	t.Run("workers", func(t *testing.T) {
		one, two := start(t, "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1790"), start(t, "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1790")
		group := cgroup(t)
		defer one.end()
		defer two.end()
		one.moveTo(t, group)
		two.moveTo(t, group)
		if got := adopt(t, Member{Cgroup: group}, both...).PIDs(); len(got) != 1 {
			t.Errorf("sockets of processes %v, want those of one", got)
		}
	})
}

func TestAdoptElsewhere(t *testing.T) {
	d := elsewhere(t, "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1790")
	refuse(t, Member{PID: d.pid()}, ErrElsewhere, fmt.Sprintf("set netns: pid:%d", d.pid()), both...)
	ns, err := netns.OfPID(d.pid())
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	a, err := Member{PID: d.pid()}.Adopt(t.Context(), ns, spec(t, both))
	if err != nil {
		t.Fatal(err)
	}
	a.Close()
}

func TestAdoptMPTCP(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		t.Skip("need: kernel 5.17 with CONFIG_MPTCP and its diagnostics")
	}
	d := start(t, "udp4 0.0.0.0:4739", "mptcp 0.0.0.0:1790")
	refuse(t, Member{PID: d.pid()}, ErrMPTCP, "listens with MPTCP at 0.0.0.0:1790", both...)
	refuse(t, Member{PID: d.pid()}, ErrMPTCP, "GODEBUG=multipathtcp=0", both...)
	// Its MPTCP listener is not the reason for another missing port, even with the same leading digits.
	other := start(t, "udp4 0.0.0.0:4739", "mptcp 0.0.0.0:179")
	refuse(t, Member{PID: other.pid()}, ErrNoSocket, "tcp4 :1790", both...)
}

func TestAdoptNobody(t *testing.T) {
	nstest.NeedRoot(t)
	gone := exec.Command("/proc/self/exe", "-test.run=^$")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	pid := gone.Process.Pid
	refuse(t, Member{PID: pid}, ErrNotRunning, fmt.Sprintf("process %d has exited", pid), both...)
	refuse(t, Member{PIDFile: pidFile(t, fmt.Sprint(pid))}, ErrNotRunning, "has exited", both...)
	refuse(t, Member{PIDFile: "/nonexistent/pid"}, ErrNotRunning, "/nonexistent/pid: file does not exist", both...)
	refuse(t, Member{PIDFile: pidFile(t, "")}, ErrNotRunning, "is empty; the daemon may still be starting", both...)
	refuse(t, Member{PIDFile: pidFile(t, "nfacctd")}, ErrNotRunning, `on its first line`, both...)
	refuse(t, Member{Cgroup: "/weir-no-such"}, ErrNotRunning, "no such cgroup", both...)
	group := cgroup(t)
	refuse(t, Member{Cgroup: group}, ErrNotRunning, fmt.Sprintf("cgroup %s has no process", group), both...)
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		refuse(t, Member{Unit: "nfacctd@0"}, units.ErrNoSystemd, "name the member by pidfile, cgroup or pid instead", both...)
	}
	if _, err := (Member{}).Adopt(t.Context(), here(t), spec(t, both)); err == nil || !strings.Contains(err.Error(), "no process named") {
		t.Errorf("a member that names nobody: %v", err)
	}
}

// A zombie has no sockets, although it is in /proc.
func TestAdoptZombie(t *testing.T) {
	d := start(t, "udp4 0.0.0.0:4739", "tcp4 0.0.0.0:1790")
	a := adopt(t, Member{PID: d.pid()}, both...)
	if err := d.Process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error {
		if a.Alive() {
			return errors.New("a killed member is still taken to be alive")
		}
		return nil
	})
	if p, err := pidfd.Open(d.pid()); err != nil {
		t.Errorf("not a zombie: %v", err)
	} else {
		p.Close()
	}
	refuse(t, Member{PID: d.pid()}, ErrNotRunning, "has exited", both...)
	// Its sockets live on here, and keep the address in use.
	if _, err := net.Listen("tcp4", "0.0.0.0:1790"); err == nil {
		t.Error("the duplicate does not hold the socket")
	}
}

func TestFindNetns(t *testing.T) {
	nstest.NeedRoot(t)
	own := here(t)
	name := fmt.Sprintf("weir-service-%d", os.Getpid())
	named, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	defer named.Close()
	d := elsewhere(t)
	theirs, err := netns.OfPID(d.pid())
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	dead := Member{PIDFile: "/nonexistent"}
	user := exec.Command("sleep", "60")
	user.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	if err := user.Start(); err != nil {
		t.Fatal(err)
	}
	defer user.Wait()
	defer user.Process.Kill()
	for what, c := range map[string]struct {
		netns   string
		members []Member
		want    *netns.Handle
		certain bool
	}{
		"nothing said":       {"", nil, own, false},
		"named":              {name, []Member{{PID: d.pid()}}, named, true},
		"by pid":             {fmt.Sprintf("pid:%d", d.pid()), nil, theirs, true},
		"by path":            {fmt.Sprintf("/proc/%d/ns/net", d.pid()), nil, theirs, true},
		"of a member":        {"", []Member{{PID: d.pid()}}, theirs, true},
		"of the one running": {"", []Member{dead, {PID: d.pid()}}, theirs, true},
		"none running":       {"", []Member{dead, dead}, own, false},
		"of a user's own":    {"", []Member{{PID: user.Process.Pid}}, own, false},
		"of another member":  {"", []Member{{PID: user.Process.Pid}, {PID: d.pid()}}, theirs, true},
	} {
		ns, certain, err := Spec{Netns: c.netns, Members: c.members}.FindNetns(t.Context())
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		if !ns.Same(c.want) || certain != c.certain {
			t.Errorf("%s: %s, certain %v; want %s, %v", what, ns, certain, c.want, c.certain)
		}
		ns.Close()
	}
	if _, _, err := (Spec{Netns: "weir-absent"}).FindNetns(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a name that is not there: %v", err)
	}
}

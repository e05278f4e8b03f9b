// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/feature/steer/sockholder"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"kept": playKept, "routed": playRouted, "daemon": playDaemon, "apply": playApply, "apply-skeleton": playApplySkeleton, "confirm": playConfirm, "watch": playWatch, "read": playRead, "dump": playDump, "doctor": playDoctor, "collector": playCollector, "hold": playHold, "right": playRight, "bounded": playBounded, "inherits": playInherits, "gives": playGives})
	nstest.Main(m)
}

// playHold holds the sockets of engine sk_reuseport: ROOT SCOPE ENGINE.
func playHold(f []string) error {
	return sockholder.Run(context.Background(), kernel.OpenRoot(f[0]), f[1], spec.Engine(f[2]))
}

func playDoctor(f []string) error {
	d := New(f[0]).Doctor(context.Background())
	fmt.Println("able:", d.Able())
	return json.NewEncoder(os.Stdout).Encode(d)
}

// playDaemon listens on UDP and TCP at each address until its input ends.
func playDaemon(addrs []string) error {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(cerr, err)
	}}
	lc.SetMultipathTCP(false)
	var open []io.Closer
	for _, a := range addrs {
		p, err := lc.ListenPacket(context.Background(), "udp4", a)
		if err != nil {
			return err
		}
		l, err := lc.Listen(context.Background(), "tcp4", a)
		if err != nil {
			return err
		}
		open = append(open, p, l)
	}
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	for _, c := range open {
		c.Close()
	}
	return err
}

// child returns another process with a role, in a directory open to all users.
func child(role string, args ...any) *exec.Cmd {
	c := nstest.Child(role, args...)
	c.Dir = "/"
	return c
}

// daemon starts a collector on the addresses. end ends it.
func daemon(t *testing.T, addrs ...string) (pid int, end func()) {
	t.Helper()
	c := child("daemon")
	c.Args = append(c.Args, addrs...)
	p := nstest.StartReady(t, c)
	return p.PID(), func() { p.End() }
}

// absent is an unused PID: the limit of all PIDs.
const absent = 1 << 22

// world is a host with a pin root for one test.
type world struct {
	*Host
	t *testing.T
}

func newWorld(t *testing.T) world {
	t.Helper()
	nstest.NeedRoot(t)
	name := strings.NewReplacer("/", "_", " ", "_").Replace(t.Name())
	w := world{New(filepath.Join(nstest.BPFFS, fmt.Sprintf("%.40s_%d", name, time.Now().UnixNano()%1e9))), t}
	t.Cleanup(func() {
		attached := w.links()
		if err := w.Remove(context.Background(), "", true); err != nil {
			t.Error(err)
		}
		// The kernel detaches unpinned programs later: they must not meet the packets of the next test.
		for _, id := range attached {
			nstest.Until(t, "a link that was removed is gone", func() bool {
				l, err := link.NewFromID(id)
				if err == nil {
					l.Close()
				}
				return errors.Is(err, os.ErrNotExist)
			})
		}
		if left := w.dump(); len(left) > 0 {
			t.Errorf("removed, and there is still\n%s", strings.Join(left, "\n"))
		}
	})
	return w
}

// links returns the IDs of the pinned links.
func (w world) links() (all []link.ID) {
	w.t.Helper()
	pins, err := filepath.Glob(filepath.Join(w.Root.Path(), "*", "*", "*", "link_*"))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, path := range pins {
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			w.t.Fatal(err)
		}
		if info, err := l.Info(); err != nil {
			w.t.Error(err)
		} else {
			all = append(all, info.ID)
		}
		l.Close()
	}
	return all
}

func (w world) config(text string, args ...any) *Config {
	w.t.Helper()
	c, err := ParseConfig("weir.yaml", fmt.Appendf(nil, text, args...))
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// apply applies a configuration. The first one may take traffic away: the tests' services have slots without members, at
// the ports of their daemons.
func (w world) apply(c *Config) []string {
	w.t.Helper()
	if st, err := state.Read(w.t.Context(), w.Root); err == nil && len(st.Services) == 0 {
		first := *c
		first.AllowOutage = true
		c = &first
	}
	var done []string
	err := w.Apply(w.t.Context(), c, func(d Done) {
		s := d.Step.String()
		if d.Note != "" {
			s += " (" + d.Note + ")"
		}
		done = append(done, s)
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return done
}

func (w world) plan(c *Config) []string {
	w.t.Helper()
	p, err := w.Plan(w.t.Context(), c)
	if err != nil {
		w.t.Fatal(err)
	}
	var steps []string
	for _, s := range p.Steps {
		steps = append(steps, s.String())
	}
	return steps
}

func (w world) state() state.State {
	w.t.Helper()
	st, err := state.Read(w.t.Context(), w.Root)
	if err != nil {
		w.t.Fatal(err)
	}
	return st
}

// dump lists every pin with its permissions, the kernel's ID of its object, and the contents of maps.
func (w world) dump() []string {
	w.t.Helper()
	var out []string
	err := filepath.WalkDir(w.Root.Path(), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		rel, _ := filepath.Rel(w.Root.Path(), path)
		if rel == "+lock" {
			return nil // exists while anything else does, and is not part of it
		}
		what, err := pinned(path, d)
		out = append(out, fmt.Sprintf("%s %04o %d:%d inode %d %s", rel, info.Mode().Perm(), st.Uid, st.Gid, st.Ino, what))
		return err
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Fatal(err)
	}
	return out
}

func pinned(path string, d fs.DirEntry) (string, error) {
	if d.IsDir() {
		return "directory", nil
	}
	if strings.HasPrefix(d.Name(), "link_") {
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return "", err
		}
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("link %d program %d", info.ID, info.Program), nil
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return "", err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return "", err
	}
	id, _ := info.ID()
	return fmt.Sprintf("map %d %s", id, contents(m)), nil
}

// contents returns the contents of a map, if they can be read in reasonable time.
func contents(m *ebpf.Map) string {
	var all []string
	show := func(k, v []byte) {
		if slices.ContainsFunc(v, func(b byte) bool { return b != 0 }) {
			all = append(all, fmt.Sprintf("%x=%.256x", k, v))
		}
	}
	switch m.Type() {
	case ebpf.Array:
		values := make([]byte, m.MaxEntries()*m.ValueSize())
		var at ebpf.MapBatchCursor
		n, err := m.BatchLookup(&at, make([]uint32, m.MaxEntries()), values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err.Error()
		}
		for i := range n {
			show(fmt.Append(nil, i), values[i*int(m.ValueSize()):][:m.ValueSize()])
		}
	case ebpf.Hash, ebpf.LRUHash, ebpf.LPMTrie:
		var k, v []byte
		for it := m.Iterate(); it.Next(&k, &v); {
			show(k, v)
		}
	default: // kernels before 6.8 wait for RCU at each lookup in a map of maps
		return m.Type().String()
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// heard sends a datagram from a source address to the service.
func heard(t *testing.T, from, to string) {
	t.Helper()
	c, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from)), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
}

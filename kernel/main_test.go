// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"crash": playCrash, "hold": playHold, "count": playCount, "read": playRead,
		"upgrade": playUpgrade, "flock": playFlock, "probe": playProbes, "bare": playBare})
	nstest.Main(m)
}

// newRoot returns a pin root for one test. It must be gone at the end, unless the test failed.
func newRoot(t testing.TB) *Root {
	t.Helper()
	nstest.NeedRoot(t)
	name := strings.Map(func(r rune) rune {
		if validName(string(r)) {
			return r
		}
		return '_'
	}, t.Name())
	r := OpenRoot(filepath.Join(nstest.BPFFS, fmt.Sprintf("%.40s_%d", name, time.Now().UnixNano()%1e9)))
	t.Cleanup(func() { os.RemoveAll(r.path) })
	return r
}

func lock(t testing.TB, r *Root) *WriteLock {
	t.Helper()
	l, err := r.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

var instance = Instance{Scope: HostScope, Feature: "test", Name: "one"}

// closers closes the objects opened by a test.
type closers []interface{ Close() error }

func (c closers) close() {
	for _, x := range c {
		x.Close()
	}
}

// publish pins an instance with two maps and a link of the current network namespace. version is in its meta and in both
// maps.
func publish(l *WriteLock, i Instance, version uint64) error {
	ln, err := attachLookup()
	if err != nil {
		return err
	}
	defer ln.Close()
	return publishWith(l, i, version, map[string]link.Link{"lookup": ln})
}

func publishWith(l *WriteLock, i Instance, version uint64, links map[string]link.Link) error {
	var open closers
	defer func() { open.close() }()
	pins := Pins{Maps: map[string]*ebpf.Map{}, Links: links}
	for _, name := range []string{"a", "b"} {
		m, err := newMap()
		if err != nil {
			return err
		}
		open = append(open, m)
		if err := m.Put(uint32(0), version); err != nil {
			return err
		}
		pins.Maps[name] = m
	}
	return l.Publish(i, metaOf(version), pins)
}

func metaOf(version uint64) Meta {
	return Meta{ABI: 7, Created: time.Unix(1700000000, 5), Version: "test", Inode: 42, Config: fmt.Append(nil, version)}
}

func newMap() (*ebpf.Map, error) {
	return ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
}

// passAll loads a minimal sk_lookup program.
func passAll() (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
}

func attachLookup() (link.Link, error) {
	p, err := passAll()
	if err != nil {
		return nil, err
	}
	defer p.Close()
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}.Attach(p)
}

// opener is a Root or a WriteLock.
type opener interface {
	Open(i Instance, maps ...string) (*Opened, error)
}

// version opens an instance and returns the version shown by all its parts, or 0 if it does not exist.
func version(r opener, i Instance) (uint64, error) {
	o, err := r.Open(i)
	if errors.Is(err, ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	defer o.Close()
	if len(o.Maps) != 2 {
		return 0, fmt.Errorf("torn: %d maps of 2", len(o.Maps))
	}
	var v uint64
	if _, err := fmt.Sscan(string(o.Meta.Config), &v); err != nil {
		return 0, err
	}
	for name, m := range o.Maps {
		var in uint64
		if err := m.Lookup(uint32(0), &in); err != nil {
			return 0, err
		}
		if in != v {
			return 0, fmt.Errorf("torn: meta is of version %d, map %s of %d", v, name, in)
		}
	}
	return v, nil
}

func wantVersion(t testing.TB, r opener, i Instance, want uint64) {
	t.Helper()
	if got, err := version(r, i); err != nil || got != want {
		t.Errorf("%s has version %d, %v; want %d", i, got, err, want)
	}
}

// tree lists everything below a pin root with mode and group. It omits the lock's directory while that is private to the
// owner.
func tree(t testing.TB, r *Root) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(r.path, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(r.path, path)
		if rel == lockDir && st.Mode().Perm() == 0o700 {
			return nil
		}
		out = append(out, fmt.Sprintf("%s %04o %d", rel, st.Mode().Perm(), st.Sys().(*syscall.Stat_t).Gid))
		return nil
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return out
}

// lookupLinks counts the sk_lookup links of the current network namespace.
func lookupLinks(t testing.TB) int {
	t.Helper()
	for {
		n, err := countLookupLinks(t)
		if err == nil {
			return n
		}
		if !errors.Is(err, syscall.EAGAIN) { // a link is being created right now
			t.Fatal(err)
		}
	}
}

func countLookupLinks(t testing.TB) (int, error) {
	t.Helper()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	n := 0
	var it link.Iterator
	defer it.Close()
	for it.Next() {
		info, err := it.Link.Info()
		if err != nil {
			t.Fatal(err)
		}
		if x := info.NetNs(); x != nil && uint64(x.NetnsInode) == ns.Inode() {
			n++
		}
	}
	return n, it.Err()
}

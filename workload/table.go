// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/units"
)

// ID is the number of a cgroup, as bpf_get_current_cgroup_id gives it. The kernel uses none again while it runs.
type ID uint64

// Workload is a cgroup with its name.
type Workload struct {
	ID ID
	Name
	Cgroup string // path from the root of the hierarchy: "/system.slice/dnsd.service"
	Gone   bool   // the cgroup was removed, and somebody still reports it
}

// Options are for [Open].
type Options struct {
	Root string // where cgroup2 is mounted; empty: where the host has it
	File string // names for cgroups, a path and a name a line; empty: none
	// Changed is called by Run for each cgroup that comes and each that goes, one at a time and in their order, without the
	// table's lock. It may be nil.
	Changed func(Workload)
}

// Table has the workloads of a host. Its methods may be called by several goroutines at once.
type Table struct {
	root    string
	names   names
	changed func(Workload)
	events  *os.File // inotify
	conn    syscall.RawConn

	mu      sync.Mutex // of all below
	all     map[ID]*entry
	paths   map[string]*entry // live ones
	watches map[int32]*entry
	pending []Workload // for changed
}

type entry struct {
	Workload
	watch int32
	refs  int
}

// Open reads all cgroups of the host, and watches for changes from then on: call [Table.Run]. Reading them needs no right.
func Open(o Options) (*Table, error) {
	var err error
	if o.Root == "" {
		if o.Root, err = units.CgroupRoot(); err != nil {
			return nil, err
		}
	}
	t := &Table{root: filepath.Clean(o.Root), changed: o.Changed, all: map[ID]*entry{}, paths: map[string]*entry{}, watches: map[int32]*entry{}}
	if o.File != "" {
		if t.names, err = readNames(o.File); err != nil {
			return nil, fmt.Errorf("names of workloads: %w", err)
		}
	}
	var st unix.Statfs_t
	if err := unix.Statfs(o.Root, &st); err != nil {
		return nil, fmt.Errorf("watch cgroups below %s: %w", o.Root, err)
	} else if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("watch cgroups: %s is no cgroup2 file system: leave Root out for the host's own", o.Root)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch cgroups: %w", explain(err))
	}
	t.events = os.NewFile(uintptr(fd), "inotify")
	if t.conn, err = t.events.SyscallConn(); err == nil {
		err = t.scan("/")
	}
	if _, ok := t.paths["/"]; err == nil && !ok {
		err = fmt.Errorf("watch cgroups: %s: %w", t.root, fs.ErrNotExist)
	}
	if err != nil {
		t.events.Close()
		return nil, err
	}
	return t, nil
}

// Run follows events until ctx is done, whose error it returns, or the table is closed.
func (t *Table) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { t.events.Close() })()
	t.tell()
	buf := make([]byte, 64<<10)
	for {
		n, err := t.events.Read(buf)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return fmt.Errorf("watch cgroups: %w", err)
		}
		if err := t.follow(buf[:n]); err != nil {
			return err
		}
		t.tell()
	}
}

// Close ends the watching. Names stay as they are.
func (t *Table) Close() error { return t.events.Close() }

// All are the workloads, in the order of their paths. Gone ones are among them while somebody holds them.
func (t *Table) All() []Workload {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Workload, 0, len(t.all))
	for _, e := range t.all {
		out = append(out, e.Workload)
	}
	slices.SortFunc(out, func(a, b Workload) int {
		if c := strings.Compare(a.Cgroup, b.Cgroup); c != 0 {
			return c
		}
		return int(min(max(int64(a.ID)-int64(b.ID), -1), 1))
	})
	return out
}

// Get is the workload of a cgroup; false: there is none, or its name was let go.
func (t *Table) Get(id ID) (Workload, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.all[id]
	if !ok {
		return Workload{}, false
	}
	return e.Workload, true
}

// Retain is Get for a reporter that keeps numbers of the workload. The name stays until as many calls of [Table.Release], also
// if the cgroup is removed meanwhile.
func (t *Table) Retain(id ID) (Workload, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.all[id]
	if !ok {
		return Workload{}, false
	}
	e.refs++
	return e.Workload, true
}

// Release ends one Hold. It panics without one: the count would be wrong from then on.
func (t *Table) Release(id ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.all[id]
	if !ok || e.refs == 0 {
		panic(fmt.Sprintf("workload: cgroup %d is released and was not held", id))
	}
	e.refs--
	t.forget(e)
}

// forget drops the name of a removed cgroup that nobody holds. The lock is held.
func (t *Table) forget(e *entry) {
	if e.Gone && e.refs == 0 {
		delete(t.all, e.ID)
	}
}

// tell calls changed for what has happened.
func (t *Table) tell() {
	t.mu.Lock()
	pending := t.pending
	t.pending = nil
	t.mu.Unlock()
	if t.changed == nil {
		return
	}
	for _, w := range pending {
		t.changed(w)
	}
}

const watched = unix.IN_CREATE | unix.IN_DELETE | unix.IN_ONLYDIR

// scan enters a cgroup and all below it. It watches each before it lists its children, so that none is missed: a child made
// meanwhile is listed, gives an event, or both. The watch, the number and the children are of one open directory: another of
// the same name may have taken its place since, and a watch of the one with the number of the other would miss all that follows.
func (t *Table) scan(path string) error {
	dir, err := os.Open(filepath.Join(t.root, path))
	if gone(err) {
		return nil // its parent has an event of it
	} else if err != nil {
		return fmt.Errorf("watch cgroup %s: %w", path, err)
	}
	children, err := t.scanOne(path, dir)
	dir.Close()
	if gone(err) {
		return nil
	} else if err != nil {
		return err
	}
	for _, c := range children {
		if c.IsDir() {
			if err := t.scan(filepath.Join(path, c.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// scanOne enters one cgroup, and returns its children.
func (t *Table) scanOne(path string, dir *os.File) ([]fs.DirEntry, error) {
	watch, err := t.watch(dir)
	if err != nil {
		return nil, fmt.Errorf("watch cgroup %s: %w", path, explain(err))
	}
	id, err := readID(int(dir.Fd()), "", unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("number of cgroup %s: %w", path, err)
	}
	t.enter(path, id, int32(watch))
	children, err := dir.ReadDir(-1)
	if err != nil {
		return nil, fmt.Errorf("cgroups below %s: %w", path, err)
	}
	return children, nil
}

// watch adds a watch of inotify to an open directory, which has no other way to name one. The descriptor of inotify stays
// non-blocking: Close ends Run.
func (t *Table) watch(dir *os.File) (watch int, err error) {
	name := fmt.Sprintf("/proc/self/fd/%d", dir.Fd())
	if e := t.conn.Control(func(fd uintptr) { watch, err = unix.InotifyAddWatch(int(fd), name, watched) }); e != nil {
		return 0, e
	}
	return watch, err
}

func (t *Table) enter(path string, id ID, watch int32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if old := t.paths[path]; old != nil {
		if old.ID == id {
			return
		}
		t.remove(old) // removed and made again before the events were read
	}
	e := &entry{Workload: Workload{ID: id, Name: t.names.identify(path), Cgroup: path}, watch: watch}
	t.all[id], t.paths[path], t.watches[watch] = e, e, e
	t.pending = append(t.pending, e.Workload)
}

// remove notes that a cgroup is gone, and all below it: events of these may have been lost. The lock is held.
func (t *Table) remove(e *entry) {
	for path, below := range t.paths {
		if strings.HasPrefix(path, strings.TrimSuffix(e.Cgroup, "/")+"/") && below != e {
			t.removeOne(below)
		}
	}
	t.removeOne(e)
}

func (t *Table) removeOne(e *entry) {
	delete(t.paths, e.Cgroup)
	if t.watches[e.watch] == e {
		delete(t.watches, e.watch)
		// An error is no matter: the kernel may have removed the watch, or the table is closed.
		_ = t.conn.Control(func(fd uintptr) { _, _ = unix.InotifyRmWatch(int(fd), uint32(e.watch)) })
	}
	e.Gone = true
	t.pending = append(t.pending, e.Workload)
	t.forget(e)
}

// follow reads inotify's events (inotify(7)).
func (t *Table) follow(b []byte) error {
	for len(b) >= unix.SizeofInotifyEvent {
		watch, mask := int32(binary.NativeEndian.Uint32(b)), binary.NativeEndian.Uint32(b[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
		if end > len(b) {
			return errors.New("watch cgroups: an event is cut off")
		}
		name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:end]), "\x00")
		b = b[end:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			if err := t.compare(); err != nil {
				return err
			}
			continue
		}
		t.mu.Lock()
		parent := t.watches[watch]
		t.mu.Unlock()
		if parent == nil || mask&unix.IN_ISDIR == 0 || name == "" {
			continue
		}
		if err := t.refresh(filepath.Join(parent.Cgroup, name)); err != nil {
			return err
		}
	}
	return nil
}

// refresh compares one cgroup with what is known of it. Events are only a reason to look: what has happened since they were
// written counts, too.
func (t *Table) refresh(path string) error {
	id, err := readID(unix.AT_FDCWD, filepath.Join(t.root, path), 0)
	if err != nil && !gone(err) {
		return fmt.Errorf("number of cgroup %s: %w", path, err)
	}
	t.mu.Lock()
	known := t.paths[path]
	if known != nil && (err != nil || known.ID != id) {
		t.remove(known)
		known = nil
	}
	t.mu.Unlock()
	if err != nil || known != nil {
		return nil
	}
	return t.scan(path)
}

// compare looks at all cgroups, after events were lost.
func (t *Table) compare() error {
	t.mu.Lock()
	paths := make([]string, 0, len(t.paths))
	for p := range t.paths {
		paths = append(paths, p)
	}
	t.mu.Unlock()
	for _, p := range paths {
		if err := t.refresh(p); err != nil {
			return err
		}
	}
	return t.scan("/")
}

// readID is the number of a cgroup's directory, named as name_to_handle_at(2) has it named.
func readID(fd int, dir string, flags int) (ID, error) {
	h, _, err := unix.NameToHandleAt(fd, dir, flags)
	if err != nil {
		return 0, err
	}
	if h.Size() != 8 {
		return 0, errors.New("it is no directory of cgroup2")
	}
	return ID(binary.NativeEndian.Uint64(h.Bytes())), nil
}

func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// explain adds the remedy to an error of inotify.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("%w: the user's watches are used up: raise fs.inotify.max_user_watches", err)
	case errors.Is(err, unix.EMFILE):
		return fmt.Errorf("%w: the user's inotify instances are used up: raise fs.inotify.max_user_instances", err)
	}
	return err
}

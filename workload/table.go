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

// ID is the number of a cgroup, as returned by bpf_get_current_cgroup_id. The kernel does not reuse it.
type ID uint64

// Workload is a cgroup with its name.
type Workload struct {
	ID ID
	Name
	Cgroup string // path from the root of the hierarchy: "/system.slice/dnsd.service"
	Gone   bool   // the cgroup was removed, and a reporter still uses it
}

// Options are the options of [Open].
type Options struct {
	Root string // mount point of cgroup2; empty: the host's
	File string // file of cgroup names, one path and name a line; empty: none
	// Changed is called by Run for each added and each removed cgroup, one at a time and in order, without the table's
	// lock. It may be nil.
	Changed func(Workload)
}

// Table holds the workloads of a host. Its methods are safe for concurrent use.
type Table struct {
	root    string
	names   names
	changed func(Workload)
	events  *os.File // inotify
	conn    syscall.RawConn

	mu      sync.Mutex // protects all fields below
	all     map[ID]*entry
	paths   map[string]*entry // existing cgroups
	watches map[int32]*entry
	pending []Workload // to be passed to changed
}

type entry struct {
	Workload
	watch int32
	refs  int
}

// Open reads all cgroups of the host and starts watching for changes: call [Table.Run]. Reading needs no rights.
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

// Run follows events until ctx is done, and returns its error, or until the table is closed.
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

// Close stops watching. The names stay.
func (t *Table) Close() error { return t.events.Close() }

// All returns the workloads, sorted by path. Removed ones are included while retained.
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

// Get returns the workload of a cgroup. It returns false if there is none, or if its name was dropped.
func (t *Table) Get(id ID) (Workload, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.all[id]
	if !ok {
		return Workload{}, false
	}
	return e.Workload, true
}

// Retain is Get for a reporter that keeps counters of the workload. The name stays until the same number of calls of
// [Table.Release], even if the cgroup is removed.
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

// Release ends one Retain. It panics without one, because the count would stay wrong.
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

// forget drops the name of a removed cgroup without reporters. The caller holds the lock.
func (t *Table) forget(e *entry) {
	if e.Gone && e.refs == 0 {
		delete(t.all, e.ID)
	}
}

// tell passes pending changes to changed.
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

// scan enters a cgroup and its descendants. It watches each cgroup before listing its children, so no child is missed: a
// child made meanwhile is listed, or causes an event, or both. The watch, the number and the children come from one open
// directory. Another cgroup of the same name may replace it meanwhile, and a mix of both would miss all later changes.
func (t *Table) scan(path string) error {
	dir, err := os.Open(filepath.Join(t.root, path))
	if gone(err) {
		return nil // its parent has an event for it
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

// scanOne enters one cgroup and returns its children.
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

// watch adds an inotify watch for an open directory, by its path in /proc. The inotify descriptor stays non-blocking,
// because Close must end Run.
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

// remove marks a cgroup and its descendants as gone: their events may have been lost. The caller holds the lock.
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
		// Ignore the error: the kernel may have removed the watch, or the table is closed.
		_ = t.conn.Control(func(fd uintptr) { _, _ = unix.InotifyRmWatch(int(fd), uint32(e.watch)) })
	}
	e.Gone = true
	t.pending = append(t.pending, e.Workload)
	t.forget(e)
}

// follow parses inotify events (inotify(7)).
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

// refresh compares one cgroup with the table. An event is only a trigger: refresh reads the current state.
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

// compare checks all cgroups after events were lost.
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

// readID returns the number of a cgroup's directory from name_to_handle_at(2).
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

// explain adds the remedy to an inotify error.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("%w: the user's watches are used up: raise fs.inotify.max_user_watches", err)
	case errors.Is(err, unix.EMFILE):
		return fmt.Errorf("%w: the user's inotify instances are used up: raise fs.inotify.max_user_instances", err)
	}
	return err
}

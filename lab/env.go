// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// prefix begins the name of every object of a run: namespaces, directory, pins.
const prefix = "weir-lab-"

// bpffs holds the pins of a run, below a root of its own. A live weir on the machine is never touched.
const bpffs = "/sys/fs/bpf"

// Env is the environment of one run: its parameters, and all resources to remove at its end.
type Env struct {
	Size    Size
	Seed    uint64
	Rand    *rand.Rand // seeded with Seed; for one goroutine
	Dir     string     // scratch directory of this run
	Root    string     // root of weir's pins, passed as --root
	Control bool       // the control run: the same experiment without weir
	Child   bool       // this run is a part of another experiment
	Watch   Watcher

	id   string
	self string
	lock *os.File

	mu         sync.Mutex
	processes  []*Process
	namespaces []string
	scopes     []string // inode numbers of the namespaces; weir names objects by them
	undo       []func()
	closed     bool
}

// NewEnv prepares a run. It needs root, and first removes the leftovers of killed runs.
func NewEnv(size Size, seed uint64) (*Env, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("network namespaces need root: run it with sudo")
	}
	if errOwn != nil {
		return nil, errOwn
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// Killed daemons leave children behind. As their reaper we inherit them, and Close finds them.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become the reaper of orphaned daemons: %w", err)
	}
	sweep()
	id := strconv.Itoa(os.Getpid())
	e := &Env{Size: size, Seed: seed, Rand: rand.New(rand.NewPCG(seed, 0)), id: id, self: self, Watch: nobody{}, Child: os.Getenv(ChildMark) != "",
		Dir: filepath.Join(os.TempDir(), prefix+id), Root: filepath.Join(bpffs, prefix+id)}
	if e.lock, err = makeDir(e.Dir, 30*time.Second); err != nil {
		return nil, err
	}
	return e, nil
}

// makeDir creates the directory of a run and locks it. Before the lock is held, the directory looks like
// the leftover of a killed run. Another run may sweep it in this moment: makeDir then creates it again.
func makeDir(dir string, limit time.Duration) (*os.File, error) {
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		lock, err := tryMakeDir(dir)
		if err == nil || errors.Is(err, errForeign) || time.Now().After(deadline) {
			return lock, err
		}
	}
}

func tryMakeDir(dir string) (*os.File, error) {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	ours, err := lock.Stat()
	if err == nil {
		err = private(ours)
	}
	if err == nil {
		var named os.FileInfo
		if named, err = os.Lstat(dir); err == nil && !os.SameFile(ours, named) {
			err = errors.New("another run recreated it")
		}
	}
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return lock, nil
}

// errForeign is returned for a directory that another user can change.
var errForeign = errors.New("another user can change it: remove it")

// private rejects a directory that another user can change: daemons of root read their configuration there, and anybody
// can make a name in /tmp.
func private(dir os.FileInfo) error {
	if owner := dir.Sys().(*syscall.Stat_t).Uid; owner != uint32(os.Geteuid()) || dir.Mode()&0o022 != 0 {
		return fmt.Errorf("user %d, mode %v: %w", owner, dir.Mode().Perm(), errForeign)
	}
	return nil
}

// lockDir locks the directory. The lock distinguishes a run in progress from a killed one.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// mark is set in the environment of every process of the run.
func (e *Env) mark() string { return runMark(e.id) }

func runMark(id string) string { return "WEIR_LAB_RUN=" + id }

// Namespace creates a network namespace for the run. Close closes the handle and removes the name.
func (e *Env) Namespace(name string) (*netns.Handle, string, error) {
	full := prefix + e.id + "-" + name
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, "", errors.New("the lab is shutting down")
	}
	h, err := netns.Create(full)
	if err != nil {
		return nil, "", fmt.Errorf("create namespace %s: %w", full, err)
	}
	e.namespaces = append(e.namespaces, full)
	e.scopes = append(e.scopes, kernel.ScopeOf(h))
	e.undo = append(e.undo, func() { h.Close() })
	return h, full, nil
}

// OnClose registers f to run at the end of the run, before its processes are killed; last in, first out.
func (e *Env) OnClose(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.undo = append(e.undo, f)
}

// Close ends every process, orphans included, and removes namespaces, pins and files. It may be called more
// than once and at any moment, even while the experiment runs.
func (e *Env) Close() {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return
	}
	e.closed = true
	undo := e.undo
	e.mu.Unlock()
	for i := len(undo) - 1; i >= 0; i-- {
		undo[i]()
	}
	started := map[int]bool{}
	for _, p := range e.processes {
		p.killGroup()
		started[p.PID] = true
	}
	endAll(e.id, namespaceInodes(e.id), 30*time.Second)
	reapOrphans(started)
	removeAll(e.id, e.scopes)
	e.lock.Close()
}

// Leftovers lists the remaining objects of this run: namespaces, processes, pins, files. Call it after
// Close.
func (e *Env) Leftovers() []string { return leftovers(e.id, e.scopes) }

// RunLeftovers lists the leftovers of another run, by the pid of its weir-lab process. Call it after the
// process has ended.
func RunLeftovers(pid int) []string { return leftovers(strconv.Itoa(pid), nil) }

func leftovers(id string, scopes []string) []string {
	var left []string
	names, err := netns.Names()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		left = append(left, "namespaces: "+err.Error()) // unknown counts as not clean
	}
	for _, n := range names {
		if strings.HasPrefix(n, prefix+id+"-") {
			left = append(left, "namespace "+n)
		}
	}
	helpers, pins := strays(scopes)
	for _, n := range helpers {
		left = append(left, "namespace "+n)
	}
	for _, pid := range ofRun(id, namespaceInodes(id)) {
		left = append(left, fmt.Sprintf("process %d (%s)", pid, processCommand(pid)))
	}
	for _, dir := range groupDirs(id) {
		left = append(left, "cgroup "+dir)
	}
	for _, dir := range slices.Concat(pins, records(id), []string{filepath.Join(bpffs, prefix+id), filepath.Join(os.TempDir(), prefix+id)}) {
		if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
			left = append(left, "directory "+dir)
		}
	}
	return left
}

// removeAll removes a run's names from the file systems. Its processes must have ended.
func removeAll(id string, scopes []string) {
	helpers, pins := strays(scopes)
	names, _ := netns.Names()
	for _, n := range names {
		if strings.HasPrefix(n, prefix+id+"-") || slices.Contains(helpers, n) {
			_ = netns.Delete(n) // leftovers reports failures
		}
	}
	for _, dir := range pins {
		_ = os.RemoveAll(dir)
	}
	removeGroups(id)
	_ = os.RemoveAll(filepath.Join(bpffs, prefix+id))
	for _, dir := range records(id) {
		_ = os.RemoveAll(dir)
	}
	_ = os.RemoveAll(filepath.Join(os.TempDir(), prefix+id))
}

// records lists weir's record directories for the pins of a run.
func records(id string) (dirs []string) {
	pins := filepath.Join(bpffs, prefix+id)
	entries, _ := os.ReadDir(kernel.RecordDir)
	for _, e := range entries {
		if root, err := url.PathUnescape(e.Name()); err == nil && (root == pins || strings.HasPrefix(root, pins+"/")) {
			dirs = append(dirs, filepath.Join(kernel.RecordDir, e.Name()))
		}
	}
	return dirs
}

// sweep removes the leftovers of killed runs. A run in progress holds the lock of its directory.
func sweep() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	for _, dir := range dirs {
		id := strings.TrimPrefix(filepath.Base(dir), prefix)
		if _, err := strconv.Atoi(id); err != nil {
			continue
		}
		lock, err := lockDir(dir)
		if err != nil {
			continue
		}
		if st, err := lock.Stat(); err != nil || private(st) != nil {
			lock.Close()
			continue
		}
		inodes := namespaceInodes(id)
		endAll(id, inodes, 30*time.Second)
		removeAll(id, slices.Collect(maps.Values(inodes)))
		lock.Close()
	}
}

// Self returns the path of the lab's own binary.
func (e *Env) Self() string { return e.self }

// ChildMark is the variable to mark a run as a part of another run. A marked run starts no child runs.
const ChildMark = "WEIR_LAB_CHILD"

// SPDX-License-Identifier: Apache-2.0

// Package bounded runs system calls with a time limit, because another user can block some of them
// in the kernel.
//
// A process can hold the lock of its socket for any time. send(2) copies under that lock, and the
// source memory may be in a file system of the process's user (FUSE). Such a file system may never
// answer. Then getsockname(2), setsockopt(2), TCP_INFO, SO_GET_FILTER, an update of a socket map,
// and iterators over sockets block. No signal ends the wait. pidfd_getfd(2) blocks in the same way
// for a process during execve(2).
package bounded

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrStuck reports a call without an answer in time.
var ErrStuck = errors.New("no answer")

const (
	limit = time.Second      // per call; far above the longest delay of a busy host
	rest  = 20 * time.Second // a party's calls fail at once for this long after a timeout

	stall     = limit / 10 // such a late timer shows a stall of the host
	maxStalls = 3          // per call
	// A stuck call occupies a thread.
	maxStuck = 4   // per party
	maxTotal = 500 // in total
)

// party is a user, process or socket able to block calls.
type party struct {
	stuck int
	until time.Time
}

var (
	mu      sync.Mutex
	parties = map[string]*party{}
	total   int
)

// User returns the party of a user's processes and sockets.
func User(uid uint32) string { return "user " + strconv.FormatUint(uint64(uid), 10) }

// Process returns the party of a process: its user. Each process of root is its own party. It only
// reads data available during an execve.
func Process(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, ids, _ := strings.Cut(string(data), "\nUid:\t")
	id, _, found := strings.Cut(ids, "\t")
	if err != nil || !found || id == "0" {
		return fmt.Sprintf("process %d", pid)
	}
	return "user " + id
}

// Socket returns the party of a socket: the user who opened it. Each socket of root is its own
// party, because daemons open theirs as root.
func Socket(fd int) string {
	var st unix.Stat_t
	switch err := unix.Fstat(fd, &st); {
	case err != nil:
		return "closed sockets"
	case st.Uid != 0:
		return User(st.Uid)
	}
	return fmt.Sprintf("socket %d", st.Ino)
}

// Do runs f in another thread and waits at most a second. After a timeout, calls for the same party
// fail at once for a while. f may continue after Do has returned. late, unless nil, then gets its
// results.
func Do[T any](who string, f func() (T, error), late func(T, error)) (T, error) {
	return DoLazy(func() string { return who }, f, late)
}

// DoLazy is [Do] for many quick calls. It calls of only while some call is stuck, so of may be
// slow.
func DoLazy[T any](of func() string, f func() (T, error), late func(T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	var none T
	of = sync.OnceValue(of)
	if anyStuck() && !enter(of()) {
		return none, fmt.Errorf("%w: a call of %s is stuck: end its processes", ErrStuck, of())
	}
	var once sync.Mutex // guards gone; lock it before the package's mu
	gone := false
	done := make(chan result, 1)
	go func() {
		v, err := f()
		once.Lock()
		defer once.Unlock()
		if !gone {
			done <- result{v, err}
			return
		}
		back(of())
		if late != nil {
			late(v, err)
		}
	}()
	if r, ok := wait(done); ok {
		return r.v, r.err
	}
	once.Lock()
	defer once.Unlock()
	select {
	case r := <-done:
		return r.v, r.err
	default:
	}
	gone = true
	stuck(of())
	return none, fmt.Errorf("%w: a call of %s did not return within %s: end its processes", ErrStuck, of(), limit)
}

// wait waits for a result for limit. After a stall of the host itself, for example of a virtual
// machine, the time starts again.
func wait[T any](done <-chan T) (v T, ok bool) {
	began := time.Now() // before the timer, because the host may stall in between
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for range maxStalls {
		select {
		case v := <-done:
			return v, true
		case <-timer.C:
		}
		if time.Since(began) < limit+stall {
			break
		}
		began = time.Now()
		timer.Reset(limit)
	}
	return v, false
}

// Run is Do for a call without a result.
func Run(who string, f func() error) error {
	_, err := Do(who, func() (struct{}, error) { return struct{}{}, f() }, nil)
	return err
}

func anyStuck() bool {
	mu.Lock()
	defer mu.Unlock()
	return len(parties) > 0
}

// enter reports whether a call for the party may run.
func enter(who string) bool {
	mu.Lock()
	defer mu.Unlock()
	p := parties[who]
	if p == nil {
		return total < maxTotal
	}
	if time.Now().Before(p.until) || p.stuck >= maxStuck {
		return false
	}
	if p.stuck == 0 {
		delete(parties, who)
	}
	return total < maxTotal
}

func stuck(who string) {
	mu.Lock()
	defer mu.Unlock()
	p := parties[who]
	if p == nil {
		p = &party{}
		parties[who] = p
	}
	p.stuck++
	total++
	p.until = time.Now().Add(rest)
}

// Forgive permits calls for all parties again. It is for tests, because they share one process.
func Forgive() {
	mu.Lock()
	defer mu.Unlock()
	for _, p := range parties {
		p.until = time.Time{}
	}
}

// back records the return of an abandoned call. The party is forgotten with its next call.
func back(who string) {
	mu.Lock()
	defer mu.Unlock()
	total--
	if p := parties[who]; p != nil {
		p.stuck--
	}
}

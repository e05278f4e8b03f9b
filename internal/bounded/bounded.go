// SPDX-License-Identifier: Apache-2.0

// Package bounded runs calls that another user can make wait in the kernel, and gives them up after a time.
//
// A process can hold the lock of its socket for as long as it likes: send(2) copies under that lock, from memory that may
// lie on a file system of the process's user (FUSE), which answers when it likes. Then getsockname(2), setsockopt(2),
// TCP_INFO, SO_GET_FILTER, an update of a socket map, and iterators over sockets wait, and no signal ends that.
// pidfd_getfd(2) waits likewise for a process in the midst of execve(2).
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

// ErrStuck says that a call has not come back.
var ErrStuck = errors.New("no answer")

const (
	limit = time.Second      // for a call; the longest delay of a busy host is far below
	rest  = 20 * time.Second // for which a party's calls fail at once, after one was given up

	stall     = limit / 10 // a timer that is so late tells that the host stood still
	maxStalls = 3          // of one call
	// A call that does not come back holds a thread.
	maxStuck = 4   // of one party
	maxTotal = 500 // of all
)

// party is who can make calls wait.
type party struct {
	stuck int
	until time.Time
}

var (
	mu      sync.Mutex
	parties = map[string]*party{}
	total   int
)

// User is the party of a user's processes and sockets.
func User(uid uint32) string { return "user " + strconv.FormatUint(uint64(uid), 10) }

// Process is the party of a process: its user. Root's are each for themselves. It reads what the kernel tells during an
// execve as well.
func Process(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, ids, _ := strings.Cut(string(data), "\nUid:\t")
	id, _, found := strings.Cut(ids, "\t")
	if err != nil || !found || id == "0" {
		return fmt.Sprintf("process %d", pid)
	}
	return "user " + id
}

// Socket is the party of a socket: its user, who opened it. Root's sockets are each for themselves, for daemons open theirs
// as root.
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

// Do runs f in another thread, and waits for a second at most. After that it fails at once for a while, for the same party.
// f may go on after Do has returned: late, unless it is nil, gets what f returns then.
func Do[T any](who string, f func() (T, error), late func(T, error)) (T, error) {
	return DoLazy(func() string { return who }, f, late)
}

// DoLazy is [Do] for many quick calls. It calls of, which may be slow, only while some call is stuck.
func DoLazy[T any](of func() string, f func() (T, error), late func(T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	var none T
	of = sync.OnceValue(of)
	if anyStuck() && !enter(of()) {
		return none, fmt.Errorf("%w: a call of %s has not come back: end its processes", ErrStuck, of())
	}
	var once sync.Mutex // guards gone; before the package's mu
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
	return none, fmt.Errorf("%w: a call of %s has not come back within %s: end its processes", ErrStuck, of(), limit)
}

// wait waits for a result for limit. A host that stands still itself, a virtual machine for instance, says nothing about the
// call: its time begins anew.
func wait[T any](done <-chan T) (v T, ok bool) {
	began := time.Now() // before the timer: the host may stand still between the two
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

// enter says whether a party's call is to be made.
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

// Forgive lets calls of all parties be made again at once. It is for tests, which are one process.
func Forgive() {
	mu.Lock()
	defer mu.Unlock()
	for _, p := range parties {
		p.until = time.Time{}
	}
}

// back notes that a call that was given up has come back. The party is forgotten with its next call.
func back(who string) {
	mu.Lock()
	defer mu.Unlock()
	total--
	if p := parties[who]; p != nil {
		p.stuck--
	}
}

// SPDX-License-Identifier: Apache-2.0

package delay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// Delay is a line in operation. It ends with Close, or with the run.
type Delay struct {
	process *lab.Process
	said    *bufio.Scanner
	out     *os.File
	errors  *lockedBuilder

	mu sync.Mutex // one request at a time
}

// New creates a line between two namespaces, equal in both directions, with its two devices and their
// addresses. A separate process of the lab's own binary carries the packets. The binary's main must call
// [Play].
func New(env *lab.Env, a, b topo.End, line Line) (*Delay, error) {
	return newTwo(env, a, b, line, line)
}

// newTwo is New with a separate line for each direction.
func newTwo(env *lab.Env, a, b topo.End, ab, ba Line) (*Delay, error) {
	return start(env, a, b, setup{Lines: [2]Line{ab, ba}})
}

// startLimit is the longest time of the process to create its devices, and to answer.
const startLimit = 60 * time.Second

func start(env *lab.Env, a, b topo.End, s setup) (*Delay, error) {
	for _, l := range s.Lines {
		if err := l.check(); err != nil {
			return nil, fmt.Errorf("delay line %s-%s: %w", a.Name, b.Name, err)
		}
	}
	s.Seed = env.Seed
	ends := [2]topo.End{a, b}
	for i, e := range ends {
		// The descriptor belongs to this process; the namespace may have no name.
		s.Ends[i] = end{Namespace: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), e.NS.FD()), Name: e.Name}
	}
	arg, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	d := &Delay{said: bufio.NewScanner(out), out: out, errors: &lockedBuilder{}}
	d.process, err = env.Start(lab.Command{Path: env.Self(), Args: []string{childArg, string(arg)}, Stdout: in, Output: d.errors,
		Env: []string{"GODEBUG=asyncpreemptoff=1"}}) // a signal every 10 ms would wake the threads needlessly
	if err != nil {
		out.Close()
		return nil, err
	}
	in.Close()
	if line, err := d.line(); err != nil || line != sayReady {
		d.Close()
		return nil, fmt.Errorf("delay line %s-%s did not start: %v: %s", a.Name, b.Name, err, d.errors)
	}
	for _, e := range ends {
		if err := topo.Configure(e); err != nil {
			d.Close()
			return nil, err
		}
	}
	return d, nil
}

// line returns the next output line of the process.
func (d *Delay) line() (string, error) {
	if err := d.out.SetReadDeadline(time.Now().Add(startLimit)); err != nil {
		return "", err
	}
	if !d.said.Scan() {
		if err := d.said.Err(); err != nil {
			return "", err
		}
		return "", io.ErrUnexpectedEOF
	}
	return d.said.Text(), nil
}

// Stats returns the counters of both directions so far: from a to b, and back.
func (d *Delay) Stats() (ab, ba Stats, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var both [2]Stats
	if err = d.process.Signal(askSignal); err != nil {
		return ab, ba, err
	}
	line, err := d.line()
	if err == nil {
		err = json.Unmarshal([]byte(line), &both)
	}
	if err != nil {
		return ab, ba, fmt.Errorf("ask the delay line: %w: %s", err, d.errors)
	}
	return both[0], both[1], nil
}

// Close cuts the line: its devices vanish, with all packets in transit.
func (d *Delay) Close() {
	_ = d.process.Signal(unix.SIGKILL) // may have ended
	<-d.process.Done()
	d.out.Close()
}

// lockedBuilder keeps the error output of a process.
type lockedBuilder struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuilder) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuilder) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.TrimSpace(l.b.String())
}

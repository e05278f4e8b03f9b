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

// Delay is a line that carries packets. It ends with Close, or with the run.
type Delay struct {
	process *lab.Process
	said    *bufio.Scanner
	out     *os.File
	errors  *lockedBuilder

	mu sync.Mutex // one question at a time
}

// New makes a line between two namespaces, the same in both directions, and its two
// devices there, with their addresses. A process of its own carries the packets, from
// the lab's own binary, whose main must call [Play].
func New(env *lab.Env, a, b topo.End, line Line) (*Delay, error) {
	return newTwo(env, a, b, line, line)
}

// newTwo is New with a line of its own for each direction.
func newTwo(env *lab.Env, a, b topo.End, ab, ba Line) (*Delay, error) {
	return start(env, a, b, setup{Lines: [2]Line{ab, ba}})
}

// startLimit is how long the process may take to make its devices, and to answer.
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
		// The descriptor is this process's; a name the namespace may not have.
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
		Env: []string{"GODEBUG=asyncpreemptoff=1"}}) // a signal every 10 ms would wake the threads for nothing
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

// line is the next thing that the process says.
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

// Stats are the numbers of both directions up to now: from a to b, and back.
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

// Close cuts the line: its devices vanish, and with them what is on its way.
func (d *Delay) Close() {
	_ = d.process.Signal(unix.SIGKILL) // may have ended
	<-d.process.Done()
	d.out.Close()
}

// lockedBuilder keeps what a process says last.
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

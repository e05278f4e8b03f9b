// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
)

// process is a running role.
type process struct {
	*lab.Process
	in    io.WriteCloser
	asks  sync.Mutex
	lines chan string // its output
	errs  *tail
}

// tail keeps the end of a process's error output.
type tail struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.b.Len() > 64<<10 {
		t.b.Reset()
	}
	return t.b.Write(b)
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}

// play starts a role in a namespace. each receives its output lines if it is not nil.
func (w *world) play(at site, role string, arg any, each func(line string)) (*process, error) {
	b, err := json.Marshal(arg)
	if err != nil {
		return nil, err
	}
	in, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	p := &process{in: out, lines: make(chan string, 4096), errs: &tail{}}
	stdout := &liner{each: func(line string) {
		if each != nil && line != "ready" && line != "dies" {
			each(line)
			return
		}
		select {
		case p.lines <- line:
		default:
		}
	}}
	p.Process, err = w.env.Start(lab.Command{Namespace: at.name, Path: w.env.Self(), Args: []string{roleArg, role, string(b)}, Nice: niceOf[role], Stdin: in, Stdout: stdout, Output: p.errs})
	if err != nil {
		out.Close()
		return nil, err
	}
	if _, err := p.answer(patience); err != nil {
		return nil, fmt.Errorf("%s at %s: %w: %s", role, at.name, err, p.errs)
	}
	return p, nil
}

// answer returns the next output line of a role.
func (p *process) answer(patience time.Duration) (string, error) {
	select {
	case l := <-p.lines:
		return l, nil
	case <-p.Done():
		return "", fmt.Errorf("it has ended: %w", p.Err())
	case <-time.After(patience):
		return "", errors.New("no answer")
	}
}

// ask sends a line to a role, and parses its answer.
func (p *process) ask(line string, v any) error {
	p.asks.Lock()
	defer p.asks.Unlock()
	if _, err := fmt.Fprintln(p.in, line); err != nil {
		return err
	}
	got, err := p.answer(patience)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(got), v)
}

// liner splits its input into lines.
type liner struct {
	rest []byte
	each func(string)
}

func (l *liner) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		line, rest, found := bytes.Cut(l.rest, []byte("\n"))
		if !found {
			return len(b), nil
		}
		l.each(string(line))
		l.rest = rest
	}
}

// kill kills a process and waits for its end.
func (p *process) kill() error {
	if err := p.Signal(unix.SIGKILL); err != nil {
		return err
	}
	<-p.Done()
	return nil
}

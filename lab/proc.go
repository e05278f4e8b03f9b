// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Command describes a process to start.
type Command struct {
	Namespace string   // name of a network namespace; "" means the lab's own
	Path      string   // program, searched in PATH and the usual sbin directories
	Args      []string // without the program name
	Env       []string // added to the lab's own environment
	Dir       string
	Stdin     *os.File  // nil: no input
	Output    io.Writer // stdout and stderr; nil discards them
	Stdout    io.Writer // stdout only, preferred to Output
	Nice      int       // like Nice= of a unit
	// Timeout is the longest wait for the end of the output after the process has ended; 0 means 1 s. It is
	// needed because a daemon's children may hold the pipe. Where all output counts, a busy machine needs
	// more.
	Timeout time.Duration
}

// Process is a process started by the lab, with all its descendants.
type Process struct {
	PID  int
	Name string

	cmd  *exec.Cmd
	done chan struct{}
	err  error
}

// Done returns a channel, closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err returns the exit error of the process. It is nil while the process runs and after exit status 0.
func (p *Process) Err() error {
	select {
	case <-p.done:
		return p.err
	default:
		return nil
	}
}

// Running reports whether the process has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Signal sends sig to the process alone, not to its children. A killed collector leaves its plugins behind,
// as in real life.
func (p *Process) Signal(sig syscall.Signal) error {
	if !p.Running() {
		return nil
	}
	return p.cmd.Process.Signal(sig)
}

// killGroup kills the process and its descendants in the same process group.
func (p *Process) killGroup() {
	if err := unix.Kill(-p.PID, unix.SIGKILL); err != nil && p.Running() {
		_ = p.cmd.Process.Kill()
	}
}

// enterArg makes the lab's binary enter a namespace and execute another program; see Enter.
const enterArg = "__enter"

// Enter handles "weir-lab __enter NETNS PROGRAM ARG…": it replaces the process by PROGRAM inside the
// network namespace. The lab starts daemons in namespaces this way because `ip netns exec` would hide bpffs
// from them. main calls Enter first. In the lab itself it returns, with an empty /run/weir for all processes of its
// runs.
func Enter() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if len(os.Args) < 4 || os.Args[1] != enterArg {
		own()
		return
	}
	err := enter(os.Args[2], os.Args[3], os.Args[3:])
	fmt.Fprintf(os.Stderr, "weir-lab: start %s: %v\n", os.Args[3], err)
	os.Exit(127)
}

// enter replaces the process by the program, and returns only on errors. execve keeps the namespace of the
// calling thread and ends all other threads.
func enter(namespace, path string, argv []string) error {
	f, err := os.Open(namespace)
	if err != nil {
		return err
	}
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return err
	}
	// Daemons raise their own limits at will. Raising the soft limit of descriptors here matches a unit
	// file.
	return unix.Exec(path, argv, os.Environ())
}

// starter runs every fork of the lab on one OS thread with the lifetime of the lab. PR_SET_PDEATHSIG is
// tied to the forking thread, and Go may end a thread at any time.
var starter = sync.OnceValue(func() chan func() {
	jobs := make(chan func())
	go func() {
		runtime.LockOSThread()
		for job := range jobs {
			job()
		}
	}()
	return jobs
})

func startOnStarter(cmd *exec.Cmd) error {
	result := make(chan error)
	starter() <- func() { result <- cmd.Start() }
	return <-result
}

// WithoutVar lists programs, separated by commas. The lab treats them as not installed, for tests of runs
// without them.
const WithoutVar = "WEIR_LAB_WITHOUT"

// Find returns the path of a program. It also searches the sbin directories, which PATH may lack.
func Find(program string) (string, error) {
	if slices.Contains(strings.Split(os.Getenv(WithoutVar), ","), program) {
		return "", fmt.Errorf("%s is treated as not installed (%s): %w", program, WithoutVar, exec.ErrNotFound)
	}
	if p, err := exec.LookPath(program); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/lib/frr"} {
		if p, err := exec.LookPath(dir + "/" + program); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s is not installed: %w", program, exec.ErrNotFound)
}

func (e *Env) command(c Command) (*exec.Cmd, error) {
	path, err := Find(c.Path)
	if err != nil {
		return nil, err
	}
	args := append([]string{path}, c.Args...)
	if c.Nice != 0 {
		nice, err := Find("nice")
		if err != nil {
			return nil, err
		}
		args = append([]string{nice, "-n", strconv.Itoa(c.Nice)}, args...)
	}
	if c.Namespace != "" {
		args = append([]string{e.self, enterArg, "/run/netns/" + c.Namespace}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Dir, c.Output, c.Output
	if c.Stdout != nil {
		cmd.Stdout = c.Stdout
	}
	if c.Stdin != nil {
		cmd.Stdin = c.Stdin
	}
	cmd.Env = append(append(os.Environ(), e.mark()), c.Env...)
	cmd.WaitDelay = cmp.Or(c.Timeout, time.Second)
	// The process gets its own group: the terminal's Ctrl-C reaches only the lab, and killing the group
	// kills all children.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd, nil
}

// Start starts a process. It ends with the lab at the latest.
func (e *Env) Start(c Command) (*Process, error) {
	cmd, err := e.command(c)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, errors.New("the lab is shutting down")
	}
	if err := startOnStarter(cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	p := &Process{PID: cmd.Process.Pid, Name: c.Path, cmd: cmd, done: make(chan struct{})}
	e.processes = append(e.processes, p)
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Weir finds the weir under test: beside the lab's own binary, where make puts both, else in PATH. The
// variable WEIR overrides this.
func (e *Env) Weir() (string, error) {
	if path := os.Getenv("WEIR"); path != "" {
		return exec.LookPath(path)
	}
	beside := filepath.Join(filepath.Dir(e.self), "weir")
	if _, err := os.Stat(beside); err == nil {
		return beside, nil
	}
	path, err := exec.LookPath("weir")
	if err != nil {
		return "", fmt.Errorf("no weir beside %s and none in PATH: run make build, or set WEIR to its path", e.self)
	}
	return path, nil
}

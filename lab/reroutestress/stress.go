// SPDX-License-Identifier: Apache-2.0

package reroutestress

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/weir-project/weir/lab"
)

// kind is a kind of stress, of all CPUs.
type kind struct {
	name  string // of the metrics
	about string
	run   string // program
	args  func() []string
}

func perCPU(n int) string { return fmt.Sprint(n * runtime.NumCPU()) }

// The FIFO hogs leave a twentieth of a CPU's time free, like the kernel's limit (sched_rt_runtime_us),
// because the lab needs some.
var kinds = []kind{
	{"user", "user-space hogs, two a CPU", "stress-ng", func() []string { return []string{"--cpu", perCPU(2), "--cpu-method", "int64"} }},
	{"fifo", "SCHED_FIFO hogs, one a CPU, 190 of each 200 ms", "chrt", func() []string {
		return []string{"-f", "50", hogs(), "--cpu", perCPU(1), "--cpu-method", "int64", "--cpu-load", "95", "--cpu-load-slice", "190"}
	}},
	{"memory", "four processes writing half of the memory again and again", "stress-ng", func() []string {
		return []string{"--vm", "4", "--vm-bytes", "50%", "--page-in"}
	}},
	{"timers", "timers and sockets, four processes each", "stress-ng", func() []string {
		return []string{"--hrtimers", "4", "--timerfd", "4", "--sock", "2"}
	}},
	{"softirq", "a flood of packets, on each CPU", "stress-ng", func() []string { return []string{"--udp-flood", perCPU(1), "--udp", perCPU(1)} }},
}

// hogs returns the path of the hogs' program: chrt searches only PATH.
func hogs() string {
	path, err := lab.Find("stress-ng")
	if err != nil {
		return "stress-ng"
	}
	return path
}

// under applies one kind of stress for a time, with a stopped process if given.
func (x *experiment) under(ctx context.Context, k kind, d time.Duration, stopped *lab.Process) error {
	out, err := os.Create(filepath.Join(x.env.Dir, "stress-"+k.name))
	if err != nil {
		return err
	}
	defer out.Close()
	args := append(k.args(), "--temp-path", x.env.Dir, "--timeout", fmt.Sprintf("%ds", int(d.Seconds())+30))
	p, err := x.env.Start(lab.Command{Namespace: x.world.floodNS, Path: k.run, Args: args, Output: out})
	if err != nil {
		return err
	}
	defer x.end(p)
	if stopped != nil {
		if err := stopped.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		defer stopped.Signal(syscall.SIGCONT)
	}
	before, err := readUsage()
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
	}
	if !p.Running() {
		return fmt.Errorf("the stress ended early: %v (see %s)", p.Err(), out.Name())
	}
	if stopped != nil && !stopped.Running() {
		return fmt.Errorf("weir's process ended: %v", stopped.Err())
	}
	after, err := readUsage()
	x.result.Set("busy_cpus_"+k.name, (after.busy-before.busy).Seconds()/after.at.Sub(before.at).Seconds())
	return err
}

// end ends the stress with all its children.
func (x *experiment) end(p *lab.Process) {
	_ = p.Signal(syscall.SIGINT)
	select {
	case <-p.Done():
	case <-time.After(2 * time.Second):
		_ = syscall.Kill(-p.PID, syscall.SIGKILL)
		<-p.Done()
	}
}

// waitUp waits until all sessions are up.
func (x *experiment) waitUp(ctx context.Context) error {
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := x.world.up(ctx)
		for _, d := range x.peers {
			if err == nil {
				err = d.up(ctx, x.env)
			}
		}
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(end) {
			return fmt.Errorf("not up after 60 s: %w", err)
		}
	}
}

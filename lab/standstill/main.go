// SPDX-License-Identifier: Apache-2.0

// Command standstill runs a command on a host with repeated stalls. All CPUs stall in the same moments,
// like in a virtual machine on a loaded host. Within minutes it finds tests with short timeouts, and
// protocols with limits valid only on a host without stalls (make hammer).
//
//	standstill [--busy 900ms] [--pause 150ms] [--seed 1] COMMAND…
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	p := plan{}
	flag.DurationVar(&p.busy, "busy", 900*time.Millisecond, "maximum of a stall; most are far shorter")
	flag.DurationVar(&p.pause, "pause", 150*time.Millisecond, "maximum of the time between stalls")
	flag.Uint64Var(&p.seed, "seed", 1, "seed of the times")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: standstill [FLAGS] COMMAND…: run a command on a host with repeated stalls")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 || p.busy <= 0 || p.pause <= 0 {
		flag.Usage()
		os.Exit(2)
	}
	status, err := run(p, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "standstill:", err)
	}
	os.Exit(status)
}

// run returns the command's status.
func run(p plan, args []string) (int, error) {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	ended, err := p.start(ctx)
	if err != nil {
		return 1, err
	}
	c := exec.CommandContext(ctx, args[0], args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.Cancel = func() error { return c.Process.Signal(unix.SIGTERM) }
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGTERM}
	err = c.Run()
	stop()
	ended()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	} else if err != nil {
		return 1, err
	}
	return 0, nil
}

// plan describes the stalls of a host.
type plan struct {
	busy, pause time.Duration // maximum
	seed        uint64
}

// spell returns the duration of one stall, and the time until the next.
func (p plan) spell(r *rand.Rand) (busy, pause time.Duration) {
	x, y := r.Float64(), r.Float64()
	return time.Duration(x * x * x * float64(p.busy)), time.Duration(y * y * float64(p.pause)) // mostly short, sometimes long
}

// start stalls all CPUs repeatedly until ctx is done. The returned function waits for its end. The kernel
// leaves other threads a part of each second (kernel.sched_rt_runtime_us), 50 ms by default.
func (p plan) start(ctx context.Context) (wait func(), err error) {
	cpus := runtime.NumCPU()
	runtime.GOMAXPROCS(cpus + 2) // stalling threads must not block other goroutines
	begun := make(chan error)
	done := make(chan struct{})
	first := time.Now().Add(100 * time.Millisecond)
	for cpu := range cpus {
		go func() {
			defer func() { done <- struct{}{} }()
			runtime.LockOSThread() // never unlocked: no other goroutine may run in this thread
			err := comeFirst(cpu)
			begun <- err
			if err == nil {
				p.burn(ctx, first)
			}
		}()
	}
	for range cpus {
		err = errors.Join(err, <-begun)
	}
	wait = func() {
		for range cpus {
			<-done
		}
	}
	return wait, err
}

// comeFirst binds this thread to a CPU, above all other threads there.
func comeFirst(cpu int) error {
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("bind a thread to CPU %d: %w", cpu, err)
	}
	// Below the priority of the measurement of stalls (lab.WatchHost).
	if err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 98}, 0); err != nil {
		return fmt.Errorf("SCHED_FIFO (run it as root): %w", err)
	}
	return nil
}

// burn occupies this thread's CPU, in the same moments as all others with the same seed.
func (p plan) burn(ctx context.Context, at time.Time) {
	r := rand.New(rand.NewPCG(p.seed, 0))
	for ctx.Err() == nil {
		busy, pause := p.spell(r)
		ts := unix.NsecToTimespec(max(0, int64(time.Until(at))))
		_ = unix.Nanosleep(&ts, nil)
		for end := at.Add(busy); time.Now().Before(end); {
		}
		if at = at.Add(busy + pause); at.Before(time.Now()) {
			at = time.Now() // the kernel has throttled this thread, too
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package reroutecost

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// cost returns the CPU time of a packet of a lane in ns. Every packet must arrive at the far side.
func (b *bench) cost(l *lane, n int) (each float64, err error) {
	if err := b.c.Variables["frame"].Set(l.frame); err != nil {
		return 0, err
	}
	before, err := b.sunk()
	if err != nil {
		return 0, err
	}
	var took time.Duration
	err = b.router.Do(func() error {
		return onOneCPU(b.cpu, func() error {
			if err := unix.Setns(b.router.FD(), unix.CLONE_NEWNET); err != nil {
				return err
			}
			begin := b.clock()
			if err := send(b.c.Programs["source"], l.in, l.frame, n); err != nil {
				return err
			}
			took = b.clock() - begin
			return nil
		})
	})
	if err != nil {
		return 0, err
	}
	after, err := b.sunk()
	if err == nil && after-before < uint64(n) {
		err = fmt.Errorf("of %d packets %d arrived at the far side", n, after-before)
	}
	return float64(took) / float64(n), err
}

// clock returns the CPU time of this thread, and of the kernel's packet thread of this CPU.
func (b *bench) clock() time.Duration {
	var own, its unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &own)
	if b.ksoftirqd > 0 {
		_ = unix.ClockGettime(int32(^b.ksoftirqd<<3|2), &its) // CPUCLOCK_SCHED of a process, linux/posix-timers.h
	}
	return time.Duration(own.Nano() + its.Nano())
}

func findKsoftirqd(cpu int) int {
	files, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, f := range files {
		if c, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(c)) == fmt.Sprintf("ksoftirqd/%d", cpu) {
			pid, _ := strconv.Atoi(strings.Split(f, "/")[2])
			return pid
		}
	}
	return 0
}

func (b *bench) sunk() (n uint64, err error) {
	var each []uint64
	err = b.c.Maps["sunk"].Lookup(uint32(0), &each)
	for _, e := range each {
		n += e
	}
	return n, err
}

// xdpContext is struct xdp_md of linux/bpf.h.
type xdpContext struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }

// send makes a device of the thread's namespace receive packets. A signal would end the run and start
// another of n packets, so signals of Go's scheduler are blocked.
func send(p *ebpf.Program, dev string, frame []byte, n int) (err error) {
	i, err := net.InterfaceByName(dev)
	if err != nil {
		return err
	}
	var preemption, before unix.Sigset_t
	preemption.Val[0] = 1 << (unix.SIGURG - 1)
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &preemption, &before); err != nil {
		return fmt.Errorf("block a signal: %w", err)
	}
	defer func() { err = errors.Join(err, unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)) }()
	_, err = p.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(n), Flags: unix.BPF_F_TEST_XDP_LIVE_FRAMES,
		Context: xdpContext{DataEnd: uint32(len(frame)), Ingress: uint32(i.Index)}})
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("the kernel lacks BPF_F_TEST_XDP_LIVE_FRAMES (Linux 5.18): %w", err)
	}
	return err
}

// onOneCPU runs f on a thread bound to a CPU, and discards the thread.
func onOneCPU(cpu int, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread must not serve other goroutines
		var set unix.CPUSet
		set.Set(cpu)
		_ = unix.SchedSetaffinity(0, &set) // some containers refuse: the kernel then chooses
		done <- f()
	}()
	return <-done
}

// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/filter/bpf"
)

// manyAddresses is the number of the source's addresses: ADDRESSES in source.bpf.c.
const manyAddresses = 1 << 20

// measuredPort is the destination port of measured packets.
const measuredPort = 5353

// source creates packets in the kernel. The loopback device of a namespace receives them.
type source struct {
	c     *kernel.Collection
	frame []byte
	close func()
}

// newSource returns a source with addresses from draw.
func (x *experiment) newSource(name string, draw func() netip.Addr) (*source, error) {
	spec, err := bpf.LoadSource()
	if err != nil {
		return nil, err
	}
	s := &source{frame: measuredFrame()}
	if s.c, err = kernel.Load(spec, []string{"source"}, nil); err != nil {
		return nil, err
	}
	if err = s.from(draw); err == nil {
		err = s.attach(x.env, name)
	}
	if err != nil {
		s.c.Close()
		return nil, err
	}
	return s, nil
}

// attach attaches the program to a device without packets. Each test run adds a program to the dispatcher
// of XDP and removes it, and waits for a grace period both times, some 25 ms together. An attached program
// avoids this (bpf_prog_change_xdp in the kernel's net/bpf/test_run.c).
func (s *source) attach(e *lab.Env, name string) error {
	ns, _, err := e.Namespace("source-" + name)
	if err != nil {
		return err
	}
	detach, err := attachLinks(ns, s.c.Programs["source"], kernel.XDP{Ifindex: 1, Device: "lo", Generic: true})
	s.close = func() { detach(); s.c.Close() }
	return err
}

// from sets the addresses.
func (s *source) from(draw func() netip.Addr) error {
	b := make([]byte, 0, 4*manyAddresses)
	for range manyAddresses {
		a := draw().As4()
		b = append(b, a[:]...)
	}
	m, err := s.c.Maps["addresses"].Memory()
	if err == nil {
		_, err = m.WriteAt(b, 0)
	}
	if err != nil {
		return fmt.Errorf("write the addresses of packets: %w", err)
	}
	return nil
}

// anywhere draws from 10.0.0.0/8.
func anywhere(r *rand.Rand) func() netip.Addr {
	return func() netip.Addr {
		return netip.AddrFrom4([4]byte{10, byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32())})
	}
}

// measuredFrame returns a UDP packet of 60 bytes. The loopback device's MAC address is all zeros.
func measuredFrame() []byte {
	b := make([]byte, 12, 60)
	b = append(b, 8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, protoUDP, 0, 0, 10, 0, 0, 1)
	b = append(b, host4[:]...)
	b = append(be.AppendUint16(be.AppendUint16(b, 40000), measuredPort), 0, 26, 0, 0)
	return append(b, "a payload of bytes"...)
}

// errLive reports a kernel without packet generation.
var errLive = errors.New("the kernel lacks BPF_F_TEST_XDP_LIVE_FRAMES (Linux 5.18)")

// unlessLive returns err, except for errLive: it then skips the lost part.
func (x *experiment) unlessLive(err error, lost string) error {
	if errors.Is(err, errLive) {
		x.result.Skip("%v: %s", err, lost)
		return nil
	}
	return err
}

// send makes the namespace of the thread receive n packets. The caller has locked the thread. The kernel
// has processed every packet on return. A signal would end the run and another run of n packets would
// begin, so send blocks the signals of Go's scheduler.
func (s *source) send(n int) (err error) {
	var preemption, before unix.Sigset_t
	preemption.Val[0] = 1 << (unix.SIGURG - 1)
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &preemption, &before); err != nil {
		return fmt.Errorf("block a signal: %w", err)
	}
	defer func() { err = errors.Join(err, unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)) }()
	_, err = s.c.Programs["source"].Run(&ebpf.RunOptions{Data: s.frame, Repeat: uint32(n), Flags: unix.BPF_F_TEST_XDP_LIVE_FRAMES})
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: %w", errLive, err)
	}
	return err
}

// sent returns the number of packets so far, modulo 2^32.
func (s *source) sent() (n uint32, err error) { return n, s.c.Variables["next"].Get(&n) }

// cpu returns the CPU time of a packet in ns, from the device on.
func (s *source) cpu(ns *netns.Handle, n int) (each float64, err error) {
	err = ns.Do(func() error {
		first, err := s.sent()
		if err != nil {
			return err
		}
		before, err := threadTime()
		if err != nil {
			return err
		}
		if err := s.send(n); err != nil {
			return err
		}
		after, err := threadTime()
		if err != nil {
			return err
		}
		last, err := s.sent()
		each = float64(after-before) / float64(last-first)
		return err
	})
	return each, err
}

// threadTime returns the CPU time of this thread. The caller has locked it.
func threadTime() (time.Duration, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano()), err
}

// inTurns measures each of n ways in every round. Another way is first in each round, so all meet the same
// machine. It ends after the given rounds. It also ends at a deadline after enough rounds for a median,
// because a loaded machine takes several times as long.
func inTurns(ctx context.Context, rounds int, most time.Duration, n int, measure func(way int) error) error {
	const enough = 9
	return onOneCPU(func() error {
		deadline := time.Now().Add(most)
		for i := 0; i < rounds && (i < enough || time.Now().Before(deadline)); i++ {
			for turn := range n {
				if err := errors.Join(ctx.Err(), measure((turn+i)%n)); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// orLeave returns when f ends or ctx does. In the latter case f continues by itself: it must not hold
// resources needed by the cleanup.
func orLeave(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// onOneCPU runs f on one CPU, so its measurements always find the same caches.
func onOneCPU(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread is bound to a CPU and must not serve other goroutines
		var set unix.CPUSet
		set.Set(runtime.NumCPU() - 1)
		_ = unix.SchedSetaffinity(0, &set) // some containers refuse: the kernel then chooses
		done <- f()
	}()
	return <-done
}

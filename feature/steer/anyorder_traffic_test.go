// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/kernel/probe"
)

// exitHook reports whether the kernel has the exit hook (an optional need).
func exitHook() bool { return probe.ExitTracepoint.Check() == nil }

// destination returns the destination of a source.
func destination(from netip.Addr) netip.AddrPort {
	if from.Is4() {
		return loopback4
	}
	return netip.AddrPortFrom(from, loopback4.Port())
}

// ask asks from every source over both protocols until end is called. end returns the number of answers.
func (p *play) ask() (end func() int) {
	stop := make(chan struct{})
	var answers atomic.Int64
	var wg sync.WaitGroup
	askers, pause := 2, time.Duration(0)
	if testing.Short() { // leave CPU time to others on an emulated machine
		askers, pause = 1, 20*time.Millisecond
	}
	for n := range askers * len(slots.Protocols) {
		proto := slots.Protocols[n%len(slots.Protocols)]
		wg.Go(func() {
			err := p.ns.Do(func() error {
				for i := n; ; i++ {
					select {
					case <-stop:
						return nil
					default:
					}
					time.Sleep(pause)
					ok, err := p.askOnce(proto, p.addrs[i%len(p.addrs)])
					if err != nil {
						return err
					}
					if ok {
						answers.Add(1)
					}
				}
			})
			if err != nil {
				p.t.Error(err)
			}
		})
	}
	return func() int {
		close(stop)
		wg.Wait()
		return int(answers.Load())
	}
}

// patiently is longer than any stall of a machine, including emulated ones.
const patiently = 30 * time.Second

// askOnce asks once and checks the result.
func (p *play) askOnce(proto string, from netip.Addr) (answered bool, err error) {
	slot, begin := p.slot[from], time.Now()
	// A missing answer without an outage may be due to a slow machine: keep waiting.
	patient := func() bool { return time.Since(begin) < patiently && !p.excused(slot, begin) }
	got, err := askPatiently(proto, from, destination(from), patiently, 100*time.Millisecond, patient)
	if err != nil {
		return false, err
	}
	switch got {
	case refused, cut, silence:
		if !p.excused(slot, begin) {
			p.t.Errorf("%s from %s: %s, between %s and %s, while slot %d had its member; outages %s",
				proto, from, got, clock(begin), clock(time.Now()), slot, p.outages(slot))
		}
		return false, nil
	}
	p.mu.Lock()
	owner, known := p.owner[got]
	p.mu.Unlock()
	if !known || owner != slot {
		p.t.Errorf("%s from %s of slot %d was answered by process %s of slot %d", proto, from, slot, got, owner)
	}
	return true, nil
}

// excused reports whether a slot had an outage since begin.
func (p *play) excused(slot int, begin time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range p.outage[slot] {
		if o.to.IsZero() || o.to.After(begin) {
			return true
		}
	}
	return false
}

func clock(t time.Time) string { return t.Format("05.000") }

// outages describes the latest outages of a slot.
func (p *play) outages(slot int) (text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.outage[slot]
	for _, o := range all[max(0, len(all)-3):] {
		text += fmt.Sprintf("%s to %s; ", clock(o.from), clock(o.to))
	}
	return text
}

// allAnswer checks that every source is finally answered.
func (p *play) allAnswer() {
	p.t.Helper()
	err := p.ns.Do(func() error {
		for _, a := range p.addrs {
			for _, proto := range slots.Protocols {
				if ok, err := p.askOnce(proto, a); err != nil {
					return err
				} else if !ok {
					p.t.Errorf("%s from %s has no answer in the end", proto, a)
				}
			}
		}
		return nil
	})
	if err != nil {
		p.t.Error(err)
	}
}

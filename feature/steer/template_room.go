// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/kernel"
)

// makeRoom keeps the sessions within their bounds; key was added, or has grown.
func (t *templateScope) makeRoom(key bpf.TemplatesSession) {
	for proved := false; ; {
		c := t.book.crowded(key.Src)
		if c == crowdNone {
			return
		}
		if c == crowdNewcomers && !proved {
			t.prove()
			if proved = true; t.book.eased() && t.book.crowded(key.Src) != crowdNewcomers {
				continue
			}
		}
		silent := t.book.silent(c, key, t.lastHeard)
		if len(silent) == 0 {
			return // the session alone, which has a bound of its own
		}
		for _, k := range silent {
			if svc, _ := t.serviceOf(collectorOf(k)); svc != nil {
				t.refuse(svc.Name, 1)
			}
			t.forget(k)
		}
	}
}

// prove finds the newcomers that have become proven sessions.
func (t *templateScope) prove() {
	for k, s := range t.book.sessions {
		if s.proven {
			continue
		}
		if h := t.store.heard(k); h.Messages >= provenMessages && h.Last > s.Born+uint64(provenAge) {
			t.book.prove(s)
		}
	}
}

// refuse counts messages and sessions of a service that are not remembered.
func (t *templateScope) refuse(service string, n uint64) {
	c := t.counts[service]
	c.Refused += n
	t.counts[service] = c
	t.untold[service] += n
}

// lastHeard is when a session was last heard: CLOCK_MONOTONIC, ns.
func (t *templateScope) lastHeard(k bpf.TemplatesSession) uint64 { return t.store.heard(k).Last }

// expire forgets exporters that have long been silent, and those that go on from
// another port.
func (t *templateScope) expire() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.prove()
	now := kernel.Monotonic()
	current := t.book.current(t.lastHeard)
	for k, s := range t.book.sessions {
		switch silent := time.Duration(now - t.lastHeard(k)); {
		case silent > sessionLife, silent > newcomerLife && !s.proven, silent > supersededLife && !current(k):
			t.forget(k)
		}
	}
}

// countRefused adds what the filter refused to the counts of the services at whose ports it came. Services
// that share a port differ by prefix, which the filter does not look at: the first of them has it.
func (t *templateScope) countRefused() {
	if t.capture == nil {
		return
	}
	for port, n := range t.capture.refused() {
		i := slices.IndexFunc(t.services, func(s *templateService) bool { return slices.Contains(servicePorts(s.Service), port) })
		if i >= 0 {
			t.refuse(t.services[i].Name, n)
		}
	}
}

// tell logs what was refused since it last did.
func (t *templateScope) tell() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for service, n := range t.untold {
		t.log.Warn("template messages refused: unreadable, or too many", "service", service, "netns", t.ns.String(), "refused", n)
	}
	clear(t.untold)
}

func (t *templateScope) flushCounts() error {
	t.countRefused()
	for name, c := range t.counts {
		if err := t.store.count(name, c); err != nil {
			return fmt.Errorf("counting templates: %w", err)
		}
		delete(t.counts, name)
	}
	return nil
}

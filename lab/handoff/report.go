// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"sync"
	"time"

	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
)

func (m *migration) report(r *lab.Result) error {
	var v verdict
	var mu sync.Mutex
	var all sync.WaitGroup
	resets, failed := 0, 0
	for _, c := range m.clients {
		all.Go(func() {
			one := c.finish()
			mu.Lock()
			defer mu.Unlock()
			v.bytes += one.bytes
			v.lost += one.lost
			v.duplicated += one.duplicated
			if one.reset {
				resets++
			}
			if one.err != nil || one.lost > 0 || one.duplicated > 0 {
				failed++
			}
			if one.err != nil {
				r.Note("client %s: %v", c.remote, one.err)
			}
		})
	}
	all.Wait()
	var transfers, stops []time.Duration
	var returned, deaf, parked, sent uint64
	for _, h := range m.servers {
		s, err := h.status()
		if err != nil {
			return err
		}
		took, stopped, err := h.times()
		if err != nil {
			return err
		}
		transfers, stops = append(transfers, took...), append(stops, stopped...)
		returned, deaf, parked, sent = returned+s.Quarantine.Returned, deaf+s.Quarantine.Deaf, parked+s.Quarantine.Buffered, sent+s.Bytes
		for what, n := range s.Rejected {
			r.Note("%s: %s refused %d times", h.name(), what, n)
		}
	}
	for metric, n := range map[string]float64{"migrations": float64(m.moved), "servers": float64(len(m.servers)), "failed": float64(failed), "came_back": float64(m.back), "session_bytes": float64(sent) / float64(max(1, m.moved)), "resets_seen": float64(resets), "bytes": float64(v.bytes),
		"bytes_lost": float64(v.lost), "bytes_duplicated": float64(v.duplicated), "packets_returned": float64(returned), "packets_too_late": float64(deaf), "packets_parked": float64(parked)} {
		r.Set(metric, n)
	}
	times(r, "transfer_ms", transfers)
	times(r, "stopped_ms", stops)
	var gaps, calm []time.Duration
	for _, s := range m.spans {
		calm = append(calm, s.client.gap(s.calm()))
		gaps = append(gaps, s.client.gap(s.began, s.ended))
	}
	times(r, "client_stall_ms", gaps)
	times(r, "client_gap_calm_ms", calm)
	times(r, "delivered_ms", m.shown)
	return nil
}

// longStall is the longest accepted gap of a client around a move.
const longStall = 20 * time.Millisecond

// reportStalls counts moves with a longer gap. A gap belongs to the machine if it is short enough without
// the machine's stall within it.
func (m *migration) reportStalls(r *lab.Result, machine *lab.Stalls) {
	wall, monotonic := time.Now(), kernel.Monotonic()
	at := func(t time.Time) uint64 { return monotonic - uint64(wall.Sub(t)) } // arrival times use the kernel's wall clock
	long, explained := 0, 0
	for _, s := range m.spans {
		began, ended := s.client.longestGap(s.began, s.ended)
		gap := ended.Sub(began)
		if gap <= longStall {
			continue
		}
		stood := machine.Within(at(began), at(ended))
		if gap-stood <= longStall {
			explained++
			continue
		}
		long++
		r.Note("client %s heard nothing for %s around a move, including %s of stalls of the machine", s.client.remote, gap.Round(100*time.Microsecond), stood.Round(100*time.Microsecond))
	}
	r.Set("client_stalls_over_20ms", float64(long))
	r.Set("client_stalls_explained", float64(explained))
}

// times sets a metric's p50, p99 and max.
func times(r *lab.Result, metric string, d []time.Duration) {
	p50, p99, longest := lab.Percentiles(d)
	for k, v := range map[string]time.Duration{"_p50": p50, "_p99": p99, "_max": longest} {
		r.Set(metric+k, float64(v.Microseconds())/1000)
	}
}

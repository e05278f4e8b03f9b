// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/routers"
)

// span is an epoch with its slots free of disturbance from begin to end.
type span struct {
	epoch uint32
	calm  map[int]bool
	end   time.Time
}

// totals are sums over a ledger, by metric.
type totals map[string]float64

func (t totals) add(u totals) {
	for m, n := range u {
		t[m] += n
	}
}

func (t totals) set(r *lab.Result) {
	for m, n := range t {
		r.Set(m, n)
	}
}

// audit compares and sums all counts at the end of a run.
//
// In a span with a calm slot, the collector's count of a device must equal the sent count. In other spans
// it may be less, because the collector was dead, but never more. No other collector may have records.
func (l *ledger) audit(spans []span) totals {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := totals{"misdirected": float64(l.misdirected), "odd_log_lines": float64(l.odd),
		"gaps_for_templates": float64(l.gaps), "deaf_starts": float64(l.deafStarts), "crashed_starts": float64(len(l.crashed)), "templates_missing": float64(l.reminded),
		"rejects_dead_slot": float64(l.rejectedByWeir), "rejects_noticed": float64(l.rejectedDead),
		"rejected_other_slots": float64(l.rejected), "sessions_lost_dead_slot": float64(l.lostDead), "split_devices": 0, "miscounted": 0}
	for _, s := range spans {
		// A count short at its deadline is wrong, even if the records came later.
		t["miscounted"] += float64(max(l.auditSpan(s, t), l.mismatched[s.epoch]))
	}
	t["decode_errors"] = t["odd_log_lines"] + t["miscounted"]
	for _, a := range l.accounts {
		if a.split() {
			t["split_devices"]++
			l.result.Note("%s is split over %d collectors", a.addr, len(a.collectors()))
		}
	}
	return t
}

// auditSpan compares one span, adds its records to the totals, and returns the number of miscounted
// devices.
func (l *ledger) auditSpan(s span, t totals) (wrong int) {
	for i, a := range l.accounts {
		if a.real {
			continue
		}
		h, _ := a.home(s.epoch)
		exact, right := s.calm[h.slot] && h.old == unknown, true
		for _, p := range []routers.Protocol{routers.IPFIX, routers.BMP} {
			want, got := l.fleet.Sent(p, i, s.epoch), a.counted[p][s.epoch]
			t["records_sent"] += float64(want)
			if exact {
				t["records_accepted"] += float64(want)
				t["records_counted"] += float64(got)
				right = right && want == got
			} else {
				right = right && got <= want
			}
		}
		if !right {
			wrong++
		}
	}
	return wrong
}

// census counts the devices, routers, collectors and protocols seen by collectors.
func (l *ledger) census() totals {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := totals{"devices": 0, "real_routers": 0}
	collectors, protocols := map[int]bool{}, map[routers.Protocol]bool{}
	for _, a := range l.accounts {
		if a.total[routers.IPFIX] > 0 && a.total[routers.BMP] > 0 {
			t["devices"]++
			if a.real {
				t["real_routers"]++
			}
		} else {
			l.result.Note("%s: %d IPFIX and %d BMP records in total", a.addr, a.total[routers.IPFIX], a.total[routers.BMP])
		}
		for p, n := range a.total {
			protocols[p] = protocols[p] || n > 0
		}
		for c := range a.collectors() {
			collectors[c] = true
		}
	}
	t["collectors"], t["protocols"] = float64(len(collectors)), float64(len(protocols))
	return t
}

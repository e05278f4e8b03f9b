// SPDX-License-Identifier: Apache-2.0

package telemetry

import "github.com/weir-project/weir/lab/routers"

// span is an epoch, with the slots that nothing disturbed from its begin to its end.
type span struct {
	epoch uint32
	calm  map[int]bool
}

// audit compares everything at the end of a run, and sets the metrics that are sums over it.
//
// In a span in which a device's slot was calm, what its collector counted must equal what it sent. In any
// other it may be less, for the collector was dead, but never more. Nothing may be anywhere else.
func (l *ledger) audit(spans []span) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var sent, accepted, counted, wrong int
	for _, s := range spans {
		bad := 0
		for i, a := range l.accounts {
			if a.real {
				continue
			}
			right := true
			for _, p := range []routers.Protocol{routers.IPFIX, routers.BMP} {
				want, got := l.fleet.Sent(p, i, s.epoch), a.counted[p][s.epoch]
				sent += want
				if s.calm[a.slot] {
					accepted += want
					counted += got
					right = right && want == got
				} else {
					right = right && got <= want
				}
			}
			if !right {
				bad++
			}
		}
		// A count that was still short when it was due counts as wrong, also if it came later.
		wrong += max(bad, l.mismatched[s.epoch])
	}
	devices, split := 0, 0
	collectors, protocols := map[int]bool{}, map[routers.Protocol]bool{}
	realRouters := 0
	for _, a := range l.accounts {
		if len(a.at) > 1 {
			split++
			l.result.Note("%s is split over %d collectors", a.addr, len(a.at))
		}
		if a.total[routers.IPFIX] > 0 && a.total[routers.BMP] > 0 {
			devices++
			if a.real {
				realRouters++
			}
		} else {
			l.result.Note("%s: %d IPFIX and %d BMP records in all", a.addr, a.total[routers.IPFIX], a.total[routers.BMP])
		}
		for p, n := range a.total {
			protocols[p] = protocols[p] || n > 0
		}
		for c := range a.at {
			collectors[c] = true
		}
	}
	for metric, n := range map[string]int{
		"devices": devices, "collectors": len(collectors), "protocols": len(protocols), "real_routers": realRouters,
		"split_devices": split, "misdirected": l.misdirected, "decode_errors": l.odd + wrong, "odd_log_lines": l.odd, "gaps_for_templates": l.gaps, "deaf_starts": l.deafStarts,
		"miscounted": wrong, "records_sent": sent, "records_accepted": accepted, "records_counted": counted,
		"rejects_dead_slot": l.rejectedByWeir, "rejects_noticed": l.rejectedDead, "rejected_other_slots": l.rejected, "sessions_lost_dead_slot": l.lostDead,
	} {
		l.result.Set(metric, float64(n))
	}
}

// SPDX-License-Identifier: Apache-2.0

package backend

import "time"

// timeout is how long an agent waits in a move before it asks the load balancer. The load
// balancer lets packets go after its hold: an agent that waits longer would ask too late, so
// 7/10 of hold is the most.
func (a *Agent) timeout() time.Duration {
	if hold := time.Duration(a.bufferTime.Load()); hold > 0 && a.o.Timeout >= hold {
		return hold * 7 / 10
	}
	return a.o.Timeout
}

// tooPatient says that patience does not fit the load balancer; nil: it does, or the load
// balancer does not say for how long it holds packets.
func (a *Agent) tooPatient() error {
	hold := time.Duration(a.bufferTime.Load())
	if hold == 0 || a.o.Timeout < hold {
		return nil
	}
	return a.o.TimeoutAt.Errorf("timeout %s of handoff.backend: the load balancer holds packets of a session that moves for %s: take less, or raise lb.buffer_timeout in its weir.yaml; until then %s is used",
		a.o.Timeout, hold, a.timeout())
}

// setBufferTime takes for how many milliseconds the load balancer holds packets, 0: it does not say.
func (a *Agent) setBufferTime(ms int64) {
	hold := time.Duration(ms) * time.Millisecond
	if time.Duration(a.bufferTime.Swap(int64(hold))) == hold {
		return
	}
	if err := a.tooPatient(); err != nil {
		a.o.Log.Error("timeout is too long for this load balancer", "err", err)
	}
}

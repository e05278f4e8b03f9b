// SPDX-License-Identifier: Apache-2.0

package backend

import "time"

// timeout returns the time that an agent waits in a move before it asks the load balancer. The load balancer forwards
// packets after its buffer time, so waiting longer would be too late. The maximum is 7/10 of the buffer time.
func (a *Agent) timeout() time.Duration {
	if hold := time.Duration(a.bufferTime.Load()); hold > 0 && a.o.Timeout >= hold {
		return hold * 7 / 10
	}
	return a.o.Timeout
}

// tooPatient returns an error if the timeout does not fit the load balancer's buffer time. It returns nil if the
// buffer time is unknown.
func (a *Agent) tooPatient() error {
	hold := time.Duration(a.bufferTime.Load())
	if hold == 0 || a.o.Timeout < hold {
		return nil
	}
	return a.o.TimeoutAt.Errorf("timeout %s of handoff.backend: the load balancer buffers packets of a moving session for %s: lower the timeout, or raise lb.buffer_timeout in its weir.yaml; until then %s is used",
		a.o.Timeout, hold, a.timeout())
}

// setBufferTime sets the load balancer's buffer time in milliseconds; 0: unknown.
func (a *Agent) setBufferTime(ms int64) {
	hold := time.Duration(ms) * time.Millisecond
	if time.Duration(a.bufferTime.Swap(int64(hold))) == hold {
		return
	}
	if err := a.tooPatient(); err != nil {
		a.o.Log.Error("timeout is too long for this load balancer", "err", err)
	}
}

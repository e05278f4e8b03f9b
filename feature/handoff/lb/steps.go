// SPDX-License-Identifier: Apache-2.0

package lb

// Steps are the steps of a move in order. Tests kill the load balancer's agent after each.
var Steps = []string{stepBuffering, stepBuffered, stepToldBuffering, stepFlipped, stepToldFlipped, stepLetGo, stepToldGone}

const (
	stepBuffering     = "load balancer: held"         // in the flow's record
	stepBuffered      = "load balancer: buffered"     // packets are buffered
	stepToldBuffering = "load balancer: told held"    // the source is told
	stepFlipped       = "load balancer: flipped"      // in the flow's record
	stepToldFlipped   = "load balancer: told flipped" // the destination is told
	stepLetGo         = "load balancer: let go"       // buffered packets are released
	stepToldGone      = "load balancer: told gone"    // the source is told: another backend has the session for good
)

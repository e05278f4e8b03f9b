// SPDX-License-Identifier: Apache-2.0

package lb

// Steps are those of a move after which a load balancer's agent may die, in the order in which they come.
var Steps = []string{stepBuffering, stepBuffered, stepToldBuffering, stepFlipped, stepToldFlipped, stepLetGo, stepToldGone}

const (
	stepBuffering     = "load balancer: held"         // in the flow's record
	stepBuffered      = "load balancer: buffered"     // are its packets
	stepToldBuffering = "load balancer: told held"    // was the source
	stepFlipped       = "load balancer: flipped"      // in the flow's record
	stepToldFlipped   = "load balancer: told flipped" // was the destination
	stepLetGo         = "load balancer: let go"       // are the packets
	stepToldGone      = "load balancer: told gone"    // was the source: another has it for good
)

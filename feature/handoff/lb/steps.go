// SPDX-License-Identifier: Apache-2.0

package lb

// Steps are those of a move after which a load balancer's agent may die, in the order in which they come.
var Steps = []string{stepHeld, stepParked, stepToldHeld, stepFlipped, stepToldFlipped, stepLetGo, stepToldGone}

const (
	stepHeld        = "load balancer: held"         // in the flow's record
	stepParked      = "load balancer: buffered"     // are its packets
	stepToldHeld    = "load balancer: told held"    // was the source
	stepFlipped     = "load balancer: flipped"      // in the flow's record
	stepToldFlipped = "load balancer: told flipped" // was the destination
	stepLetGo       = "load balancer: let go"       // are the packets
	stepToldGone    = "load balancer: told gone"    // was the source: another has it for good
)

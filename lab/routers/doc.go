// SPDX-License-Identifier: Apache-2.0

// Package routers simulates routers with telemetry export. Each has its own source address, sends IPFIX
// (RFC 7011) over UDP, holds a BMP session (RFC 7854) over TCP, and counts its sent records.
//
// Every record carries the number of its epoch in a field printed by collectors: the ingress interface of
// an IPFIX record, the MED of a route. Counted and sent records can therefore be compared for each device,
// each protocol and each period.
package routers

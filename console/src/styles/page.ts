import "./colours.css";
import "./base.css";
import "./controls.css";
